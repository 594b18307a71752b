#!/bin/sh
# Fine-tune every parameter of a model with ms-swift.
# If the process is killed, start the same script again: the training continues at the next step.
# --optim_args accepts the options of memascend.trainer.offload() and memascend.offload().
set -eu
plugin=$(python -c 'import memascend; print(memascend.__path__[0])')/integrations/ms_swift.py
swift sft \
    --external_plugins "$plugin" \
    --optimizer memascend \
    --optim_args storage=run.store \
    --model model \
    --model_type llama \
    --template chatml \
    --dataset data.jsonl \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 2 \
    --num_train_epochs 3 \
    --learning_rate 1e-5 \
    --lr_scheduler_type cosine \
    --max_length 512 \
    --logging_steps 10 \
    --save_strategy epoch \
    --save_only_model true \
    --save_total_limit 1 \
    --output_dir trained \
    --add_version false \
    "$@"
