//! Tests elements of any size, and state tensors that have one item for several elements. Every byte must be read back,
//! and no two extents may overlap.

use crate::model::{self, ok, size};
use memascend_mem::Wait;
use memascend_nvme::sim::{Faults, Rng, SimDisk};
use memascend_store::{Commit, Description, Dtype, Record, Store};

fn described(chunk_elements: u32, records: Vec<Record>) -> Description {
    let records = records.into_iter().map(|record| Record { unit: 0, ..record }).collect();
    Description { chunk_elements, units: vec!["all".into()], records, ..model::description() }
}

/// Describes a record with several kinds of state tensors: the tensors of 8-bit moments, a tensor of packed bits, a
/// tensor with separate extents, and others.
fn blocks(name: &str, numel: u64) -> Record {
    let mut record = model::record(name, 0, Dtype::Bf16, &[numel], &[]);
    record.state = vec![
        model::tensor("exp_avg", Dtype::U8, &[numel], 1),
        model::tensor("exp_avg.absmax", Dtype::F32, &[numel.div_ceil(256)], 256),
        model::tensor("signs", Dtype::U8, &[numel.div_ceil(8)], 8),
        model::tensor("steps", Dtype::F32, &[7], 0),
        model::tensor("wide", Dtype::C128, &[numel], 1),
        model::tensor("nibbles", Dtype::U8, &[1, numel.div_ceil(2)], 2),
    ];
    record
}

fn tensors(store: &Store, record: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut rng = Rng::new(seed);
    let of = |nbytes: usize, rng: &mut Rng| (0..nbytes).map(|_| rng.bits().to_le_bytes()[0]).collect();
    ok(store.tensor_bytes(record)).into_iter().map(|nbytes| of(nbytes, &mut rng)).collect()
}

fn staged(store: &Store, step: u64) {
    for record in 0..store.description().records.len() {
        let tensors = tensors(store, record, step << 8 | record as u64);
        let parts: Vec<&[u8]> = tensors.iter().map(Vec::as_slice).collect();
        ok(store.stage_record(record, step, &parts, Wait::forever()));
    }
    ok(store.commit(Commit { step, ..Commit::default() }, Wait::forever()));
}

fn require(store: &Store, step: u64) {
    ok(store.verify(&mut |_, _| true));
    for record in 0..store.description().records.len() {
        let wanted = tensors(store, record, step << 8 | record as u64);
        let mut got: Vec<Vec<u8>> = wanted.iter().map(|bytes| vec![0; bytes.len()]).collect();
        let mut parts: Vec<&mut [u8]> = got.iter_mut().map(Vec::as_mut_slice).collect();
        ok(store.read_record(record, &mut parts));
        assert!(got == wanted, "record {record} at step {step}");
        // Reads the record again with `scan`, which must pass the same bytes in parts.
        let mut scanned: Vec<Vec<u8>> = wanted.iter().map(|bytes| vec![0; bytes.len()]).collect();
        ok(store.scan(&[record], &mut |_, parts| {
            for part in parts {
                use memascend_store::Buffer;
                // SAFETY: `scan` has waited for the read of this part, and does not use the part's memory during this
                // call.
                let bytes = unsafe { std::slice::from_raw_parts(part.memory.as_ptr().as_ptr(), part.memory.len()) };
                scanned[part.tensor][part.start..part.start + bytes.len()].copy_from_slice(bytes);
            }
            true
        }));
        assert!(scanned == wanted, "record {record} at step {step}, scanned");
    }
}

fn round_trip(description: &Description) {
    for count in 1..=2 {
        let sizes = ok(description.sizes(count, Some(model::STRIPE)));
        let bytes = size(sizes.total_bytes) / count;
        let disks: Vec<SimDisk> = (0..count).map(|_| SimDisk::new(bytes)).collect();
        let volume = model::volume(&disks, &Faults::default());
        let store = ok(Store::create_on(volume, model::STRIPE, description.clone(), &model::how()));
        assert_eq!(
            store.volume().size_bytes(),
            store.info().total_bytes,
            "the store must use exactly the bytes of the volume"
        );
        // Checks that each extent fits in a staging chunk, and that no two extents share a byte.
        let mut extents = Vec::new();
        for record in 0..description.records.len() {
            for extent in 0..store.layout().extents_of(record) {
                let extent = store.layout().extent(description, record, extent);
                let (state, values) = description.staging_bytes();
                assert!(extent.bytes() <= state.max(values));
                extents.extend((0..2).map(|slot| (store.layout().offset(&extent, slot), extent.bytes())));
            }
        }
        extents.sort_unstable();
        assert!(extents.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
        staged(&store, 0);
        staged(&store, 1);
        require(&store, 1);
        drop(store);
        let store = ok(model::open(&disks, &model::how()));
        assert_eq!(store.description(), description);
        require(&store, 1);
        staged(&store, 2);
        require(&store, 2);
    }
}

#[test]
fn one_byte_values_and_wide_state_read_back_as_written() {
    let names = ["a", "b", "c", "d", "e"];
    let wide = model::record("wide", 0, Dtype::F32, &[60_000], &names);
    let of = |(name, dtype): (&str, Dtype)| model::record(name, 0, dtype, &[120_000], &[]);
    let narrow = [("bool", Dtype::Bool), ("int8", Dtype::I8), ("fp8", Dtype::F8E5m2fnuz), ("complex", Dtype::C64)];
    let records: Vec<Record> = std::iter::once(wide).chain(narrow.map(of)).collect();
    // A chunk of 51,200 one-byte values would end inside a page. `Description::sizes` must reject this chunk size.
    let refused = described(51_200, records.clone()).sizes(1, None).map(drop).map_err(|error| error.to_string());
    assert!(refused.as_ref().is_err_and(|why| why.contains("ends inside a page")), "{refused:?}");
    round_trip(&described(49_152, records));
}

#[test]
fn state_with_grains_reads_back_as_written() {
    let sizes = [1, 7, 8, 255, 256, 257, 4095, 4096, 4097, 12_288, 12_289, 20_000, 0];
    let records = sizes.iter().map(|&numel| blocks(&format!("of {numel}"), numel)).collect();
    round_trip(&described(4096, records));
    round_trip(&described(6144, vec![blocks("odd chunks", 20_001)]));
}
