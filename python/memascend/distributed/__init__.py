"""Several ranks: models that torch's FSDP2 (`fully_shard`) divides, each rank with a store of its own rows."""
