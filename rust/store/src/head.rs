//! Encodes and decodes log heads. A log head names the gradients of one step, the places of these gradients on storage,
//! and the rules that apply these gradients.

use crate::{
    Dtype,
    checksum::{Subject, Uuid, checksum},
    fields::{Fields, Malformed, counted, push_text},
    layout::PAGE_BYTES,
};

const MAGIC: [u8; 8] = *b"mascstep";
/// Bytes of the fixed fields: magic, length, generation, oldest, committed steps, start, offset and checksum of the
/// previous head, number of rules, number of logged gradients.
const FIXED_BYTES: usize = 8 * 8 + 2 * 4;
/// Bytes of a logged gradient without its chunks: record, rule, step, dtype, number of chunks.
const LOGGED_BYTES: usize = 4 + 4 + 8 + 1 + 4;
/// Bytes of a chunk: offset and checksum.
const CHUNK_BYTES: usize = 16;
/// The smallest size in bytes of an encoded rule.
const RULE_BYTES_MIN: usize = 2 + 4 + 1 + 1;
/// The largest size in bytes of an encoded rule.
pub(crate) const RULE_BYTES_MAX: usize = 512;
/// The largest size in bytes of a name: of a rule's name, and of the name of each number in a rule.
const NAME_BYTES_MAX: usize = 64;

/// The rule that applies a gradient: the name of a kernel, and every number that the kernel uses in addition to the
/// state and the gradient.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct LoggedRule {
    /// The name of the kernel.
    pub name: String,
    /// The version of the kernel's arithmetic. Equal versions compute equal bits.
    pub arithmetic: u32,
    /// The name and the bits of each number. The kernel's specification gives the type of the bits.
    pub numbers: Vec<(String, u64)>,
    /// The bits of float32 factors. Before the kernel runs, the gradient is multiplied by one factor after the other,
    /// in float32. After each factor, the result is rounded to the gradient's dtype.
    pub factors: Vec<u32>,
}

/// One entry of [`StepHead::updates`]: an appended gradient that the commit makes part of its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedUpdate {
    /// The index of the gradient's record.
    pub record: usize,
    /// The index in [`StepHead::rules`] of the rule that applies the gradient.
    pub rule: u32,
    /// The record's count of updates, including this update.
    pub step: u64,
}

/// The appended gradients that a commit makes part of its step, and the rules that apply these gradients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StepHead {
    /// The rules that apply the gradients, without duplicates.
    pub rules: Vec<LoggedRule>,
    /// One entry for each appended gradient.
    pub updates: Vec<LoggedUpdate>,
}

/// A gradient that a log head names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedGradient {
    /// The index of the gradient's record.
    pub record: usize,
    /// The index in [`Head::rules`] of the rule that applies the gradient.
    pub rule: u32,
    /// The record's count of updates after this gradient is applied.
    pub step: u64,
    /// The dtype of the gradient.
    pub dtype: Dtype,
    /// For each chunk, its offset in the volume and its checksum.
    pub(crate) chunks: Box<[(u64, u64)]>,
}

/// The log head of one step.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Head {
    /// The generation of the commit that wrote the head.
    pub generation: u64,
    /// The generation of the oldest head that was still needed when this head was committed: this head's own generation
    /// if no older head was needed.
    pub oldest: u64,
    /// The number of committed steps, including the step of this head.
    pub step: u64,
    /// The offset in the volume at which the step's gradients in the ring begin. This head follows these gradients.
    pub(crate) start: u64,
    /// The offset and the checksum of the previous head; zeros if the log needed no earlier head.
    pub(crate) before: (u64, u64),
    /// The rules that apply the gradients.
    pub rules: Vec<LoggedRule>,
    /// The gradients of the step.
    pub logged_gradients: Vec<LoggedGradient>,
}

impl LoggedRule {
    /// Returns the length of the encoded rule.
    fn bytes(&self) -> usize {
        let numbers: usize = self.numbers.iter().map(|(name, _)| 2 + name.len() + 8).sum();
        2 + self.name.len() + 4 + 1 + numbers + 1 + 4 * self.factors.len()
    }

    /// Rejects a rule of more than [`RULE_BYTES_MAX`] bytes, or with a name of more than [`NAME_BYTES_MAX`] bytes.
    pub(crate) fn check(&self) -> Result<(), Malformed> {
        let names = self.numbers.iter().map(|(name, _)| name.len()).chain([self.name.len()]);
        if names.max().unwrap_or(0) > NAME_BYTES_MAX || self.bytes() > RULE_BYTES_MAX {
            return Err(format!(
                "the rule {:?} takes {} bytes: a rule can take at most {RULE_BYTES_MAX} bytes, and a name in it at \
                 most {NAME_BYTES_MAX}",
                self.name,
                self.bytes()
            ));
        }
        Ok(())
    }

    pub(crate) fn encode(&self, bytes: &mut Vec<u8>) {
        push_text(bytes, &self.name);
        bytes.extend(self.arithmetic.to_le_bytes());
        bytes.push(self.numbers.len() as u8);
        for (name, number) in &self.numbers {
            push_text(bytes, name);
            bytes.extend(number.to_le_bytes());
        }
        bytes.push(self.factors.len() as u8);
        self.factors.iter().for_each(|factor| bytes.extend(factor.to_le_bytes()));
    }

    fn decode(fields: &mut Fields<'_>) -> Result<Self, Malformed> {
        let (name, arithmetic) = (fields.text(NAME_BYTES_MAX)?, fields.u32()?);
        let numbers = (0..fields.u8()?).map(|_| Ok((fields.text(NAME_BYTES_MAX)?, fields.u64()?)));
        let numbers = numbers.collect::<Result<_, Malformed>>()?;
        let factors = (0..fields.u8()?).map(|_| fields.u32()).collect::<Result<_, Malformed>>()?;
        let rule = Self { name, arithmetic, numbers, factors };
        rule.check().map(|()| rule)
    }
}

/// Returns the largest size in bytes of a head that names `logged_gradients` gradients, in whole pages. These gradients
/// have `chunks` chunks in total.
pub(crate) fn head_bytes_max(logged_gradients: u64, chunks: u64) -> u64 {
    let of_logged = logged_gradients * (RULE_BYTES_MAX + LOGGED_BYTES) as u64;
    (FIXED_BYTES as u64 + of_logged + chunks * CHUNK_BYTES as u64).next_multiple_of(PAGE_BYTES)
}

/// Returns the checksum of an encoded head, bound to the head's `offset` in the volume.
pub(crate) fn head_checksum(uuid: &Uuid, offset: u64, bytes: &[u8]) -> u64 {
    checksum(uuid, Subject::Head, (offset, 0), 0, bytes)
}

/// Returns the length of a head from its first page. Fails if the page does not begin with a head, or if the length is
/// impossible or exceeds `bytes_max`.
pub(crate) fn head_bytes(page: &[u8], bytes_max: u64) -> Result<u64, Malformed> {
    let mut fields = Fields::new(page);
    if fields.take(MAGIC.len())? != MAGIC {
        return Err("it does not begin with a log head".into());
    }
    let nbytes = fields.u64()?;
    if nbytes < FIXED_BYTES as u64 || nbytes > bytes_max {
        return Err(format!("the head has an impossible size of {nbytes} bytes"));
    }
    Ok(nbytes)
}

/// Puts a valid magic and length before `fields` and returns the encoded head, for fuzzing.
pub(crate) fn begun(fields: &[u8]) -> Vec<u8> {
    let nbytes = (MAGIC.len() + 8 + fields.len()) as u64;
    [&MAGIC[..], &nbytes.to_le_bytes(), fields].concat()
}

impl Head {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        let numbers = [0, self.generation, self.oldest, self.step, self.start, self.before.0, self.before.1];
        bytes.extend(numbers.iter().flat_map(|number: &u64| number.to_le_bytes()));
        bytes.extend((self.rules.len() as u32).to_le_bytes());
        bytes.extend((self.logged_gradients.len() as u32).to_le_bytes());
        self.rules.iter().for_each(|rule| rule.encode(&mut bytes));
        for logged in &self.logged_gradients {
            bytes.extend((logged.record as u32).to_le_bytes());
            bytes.extend(logged.rule.to_le_bytes());
            bytes.extend(logged.step.to_le_bytes());
            bytes.push(logged.dtype as u8);
            bytes.extend((logged.chunks.len() as u32).to_le_bytes());
            let numbers = logged.chunks.iter().flat_map(|&(offset, sum)| [offset, sum]);
            bytes.extend(numbers.flat_map(u64::to_le_bytes));
        }
        let nbytes = bytes.len() as u64;
        bytes[MAGIC.len()..MAGIC.len() + 8].copy_from_slice(&nbytes.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let nbytes = head_bytes(bytes, bytes.len() as u64)?;
        let mut fields = Fields::new(&bytes[MAGIC.len() + 8..nbytes as usize]);
        let mut next = || fields.u64();
        let (generation, oldest, step, start) = (next()?, next()?, next()?, next()?);
        let before = (next()?, next()?);
        if generation == 0 || oldest == 0 || oldest > generation {
            return Err(format!(
                "it has generation {generation}, which needs generation {oldest}, but this is impossible"
            ));
        }
        let (rules, logged_gradients) = (fields.u32()? as usize, fields.u32()? as usize);
        let rules = counted(rules, RULE_BYTES_MIN, &mut fields, LoggedRule::decode)?;
        let logged_gradients = counted(logged_gradients, LOGGED_BYTES, &mut fields, |fields| {
            let (record, rule, step) = (fields.u32()? as usize, fields.u32()?, fields.u64()?);
            let code = fields.u8()?;
            let dtype = Dtype::from_code(code).filter(|&dtype| is_gradient(dtype));
            let dtype =
                dtype.ok_or_else(|| format!("it names a gradient of dtype {code}, which no gradient can have"))?;
            if rule as usize >= rules.len() || step == 0 {
                return Err(format!(
                    "it names rule {rule} of {} for update {step}, but this is impossible",
                    rules.len()
                ));
            }
            let chunks = fields.u32()? as usize;
            let chunks =
                counted(chunks, CHUNK_BYTES, fields, |fields| Ok::<_, Malformed>((fields.u64()?, fields.u64()?)))?;
            Ok::<_, Malformed>(LoggedGradient { record, rule, step, dtype, chunks: chunks.into() })
        })?;
        if fields.left() > 0 {
            return Err(format!("{} bytes follow the last field", fields.left()));
        }
        let mut records: Vec<usize> = logged_gradients.iter().map(|logged| logged.record).collect();
        records.sort_unstable();
        if records.windows(2).any(|two| two[0] == two[1]) {
            return Err("it names two gradients of one record".into());
        }
        Ok(Self { generation, oldest, step, start, before, rules, logged_gradients })
    }
}

/// True for the dtypes of gradients that the log accepts.
pub(crate) fn is_gradient(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let rule = LoggedRule {
            name: "adam".into(),
            arithmetic: 1,
            numbers: vec![("eps".into(), 7), ("decay".into(), u64::MAX)],
            factors: vec![1, 2],
        };
        let logged = |record, chunks: &[(u64, u64)]| LoggedGradient {
            record,
            rule: 0,
            step: 3,
            dtype: Dtype::Bf16,
            chunks: chunks.into(),
        };
        let logged_gradients = vec![logged(5, &[(4096, 1), (8192, 2)]), logged(2, &[])];
        Head { generation: 9, oldest: 7, step: 8, start: 4096, before: (12288, 4), rules: vec![rule], logged_gradients }
    }

    #[test]
    fn head_decodes_to_the_encoded_fields() {
        let bytes = head().encode();
        assert_eq!(Head::decode(&bytes), Ok(head()));
        assert!(bytes.len() as u64 <= head_bytes_max(2, 2));
        let mut padded = bytes.clone();
        padded.resize(PAGE_BYTES as usize, 0);
        assert_eq!(Head::decode(&padded), Ok(head()), "the padding of the last page is not part of the head");
    }

    #[test]
    fn decode_rejects_a_malformed_head() {
        let reason = |head: &Head| Head::decode(&head.encode()).err().unwrap_or_default();
        let broken = |change: &dyn Fn(&mut Head)| {
            let mut head = head();
            change(&mut head);
            reason(&head)
        };
        assert!(broken(&|head| head.oldest = 10).contains("which needs generation 10"));
        assert!(broken(&|head| head.logged_gradients[1].record = 5).contains("two gradients of one record"));
        assert!(broken(&|head| head.logged_gradients[0].rule = 1).contains("rule 1 of 1"));
        assert!(broken(&|head| head.logged_gradients[0].dtype = Dtype::I64).contains("a gradient of dtype 9"));
        assert!(broken(&|head| head.rules[0].factors = vec![0; 200]).contains("at most 512"));
        let bytes = head().encode();
        for end in 0..bytes.len() {
            assert!(Head::decode(&bytes[..end]).is_err(), "{end} bytes");
        }
        for at in MAGIC.len() + 8..bytes.len() {
            for changed in [0, 1, 0x7f, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = changed;
                let read = Head::decode(&bytes);
                assert!(read.is_err() || Head::decode(&read.clone().unwrap_or_default().encode()) == read, "byte {at}");
            }
        }
    }
}
