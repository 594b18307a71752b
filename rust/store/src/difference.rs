//! Explains how a store's description differs from the description that a run needs, for example by missing, extra or
//! changed records.

use std::{collections::HashMap, fmt::Debug};

use crate::{Description, Kind, Record, StateTensor};

/// The largest number of names, and of changed records, that a message lists. The message counts the rest.
const LISTED_MAX: usize = 3;

impl Description {
    /// Describes in a few sentences how `self`, the store's description, differs from `wanted`; `None` if the two
    /// descriptions are equal.
    #[must_use]
    pub fn difference(&self, wanted: &Self) -> Option<String> {
        if self == wanted {
            return None;
        }
        let mut found: Vec<String> = Vec::new();
        found.extend(differs("the optimizer", &self.optimizer, &wanted.optimizer));
        let (there, asked) = (by_name(self), by_name(wanted));
        let without = |records: &[Record], others: &HashMap<&str, &Record>| {
            let names = records.iter().map(|record| record.name.as_str()).filter(|name| !others.contains_key(name));
            names.map(str::to_owned).collect::<Vec<_>>()
        };
        let missing = without(&wanted.records, &there);
        if !missing.is_empty() {
            found.push(format!("it is missing {}", list_names(&missing)));
        }
        let extra = without(&self.records, &asked);
        if !extra.is_empty() {
            found.push(format!("it has {}, which the model does not have", list_names(&extra)));
        }
        let others = wanted.records.iter().filter_map(|asked| {
            there.get(asked.name.as_str()).and_then(|there| self.difference_of(there, wanted, asked))
        });
        // Another optimizer has other state for most records, so the sentence about the optimizer is enough.
        if self.optimizer == wanted.optimizer {
            found.extend(shortened(others.collect()));
        }
        found.extend(self.difference_of_firsts(wanted));
        if found.is_empty() {
            found.extend(self.difference_of_all(wanted));
        }
        (!found.is_empty()).then(|| found.join("; "))
    }

    /// Describes how the rows in the store differ from the wanted rows. The store may have one rank's rows instead of
    /// whole parameters, or whole parameters instead of one rank's rows, or the rows of another rank.
    fn difference_of_firsts(&self, wanted: &Self) -> Option<String> {
        if self.records != wanted.records {
            return None;
        }
        match (self.first_elements.is_empty(), wanted.first_elements.is_empty()) {
            (false, true) => {
                return Some("it has the rows of one of several ranks, but this run needs whole parameters".into());
            }
            (true, false) => {
                return Some("it has whole parameters, but this run needs the rows of one of several ranks".into());
            }
            _ => {}
        }
        let firsts = self.first_elements.iter().zip(&wanted.first_elements);
        let (record, (there, asked)) = self.records.iter().zip(firsts).find(|(_, (there, asked))| there != asked)?;
        differs(&format!("the first element of {:?}", record.name), there, asked)
    }

    /// Describes the first difference between the store's record `there` and the wanted record `asked` of the same
    /// name.
    fn difference_of(&self, there: &Record, wanted: &Self, asked: &Record) -> Option<String> {
        let name = &there.name;
        let unit = |of: &Self, record: &Record| of.units.get(record.unit as usize).cloned();
        differs(&format!("the kind of {name:?}"), &kind(there), &kind(asked))
            .or_else(|| differs(&format!("the shape of {name:?}"), &there.shape, &asked.shape))
            .or_else(|| differs(&format!("the dtype of {name:?}"), &there.dtype.name(), &asked.dtype.name()))
            .or_else(|| differs(&format!("the state of {name:?}"), &words(there), &words(asked)))
            .or_else(|| differs(&format!("the order of the dimensions of {name:?}"), &there.order, &asked.order))
            .or_else(|| differs(&format!("the unit of {name:?}"), &unit(self, there), &unit(wanted, asked)))
            .or_else(|| {
                let same = Record { unit: asked.unit, ..there.clone() } == *asked;
                (!same).then(|| format!("the dtype, if any, in which {name:?} spills gradients is not this run's"))
            })
    }

    /// Describes a difference that concerns no single record. Compares the units, the order of the records, the size of
    /// chunks and the maximum sizes of texts.
    fn difference_of_all(&self, wanted: &Self) -> Option<String> {
        if self.units != wanted.units || self.records != wanted.records {
            return Some("it has other units than the model, or its units or records are in another order".to_owned());
        }
        let numbers = |of: &Self| (of.chunk_elements, of.user_bytes_max, of.hyperparameters_bytes_max);
        (numbers(self) != numbers(wanted))
            .then(|| "its chunk_elements, user_bytes_max or hyperparameters_bytes_max is not this run's".to_owned())
    }
}

fn by_name(description: &Description) -> HashMap<&str, &Record> {
    description.records.iter().map(|record| (record.name.as_str(), record)).collect()
}

fn kind(record: &Record) -> &'static str {
    match record.kind {
        Kind::Parameter => "parameter",
        Kind::Buffer => "buffer",
    }
}

/// Returns a description of each state tensor of the record. If the format is not plain, the name of the format is the
/// first item.
fn words(record: &Record) -> Vec<String> {
    let format = record.format.name();
    let words = |of: &StateTensor| match of.grain {
        0 | 1 => format!("{} {} {:?}", of.name, of.dtype.name(), of.shape),
        grain => format!("{} {} {:?} for each {grain}", of.name, of.dtype.name(), of.shape),
    };
    (!format.is_empty()).then(|| format.to_owned()).into_iter().chain(record.state.iter().map(words)).collect()
}

/// Returns a sentence about `what` if the store's value `there` differs from the wanted value `asked`.
fn differs<T: Debug + PartialEq>(what: &str, there: &T, asked: &T) -> Option<String> {
    (there != asked).then(|| format!("{what} is {there:?} in the store, but this run needs {asked:?}"))
}

/// Lists names as in `12 records: "a", "b", "c" and 9 more`.
fn list_names(names: &[String]) -> String {
    let count = names.len();
    let first: Vec<String> = names.iter().take(LISTED_MAX).map(|name| format!("{name:?}")).collect();
    let more = if count > LISTED_MAX { format!(" and {} more", count - LISTED_MAX) } else { String::new() };
    format!("{count} {} {}{more}", if count == 1 { "record:" } else { "records:" }, first.join(", "))
}

/// Keeps the first [`LISTED_MAX`] sentences, and adds a sentence with the number of dropped sentences, if there are
/// any.
fn shortened(mut sentences: Vec<String>) -> Vec<String> {
    let more = sentences.len().saturating_sub(LISTED_MAX);
    sentences.truncate(LISTED_MAX);
    if more > 0 {
        sentences.push(format!("{more} more records differ"));
    }
    sentences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Format};

    fn record(name: &str, shape: &[u64]) -> Record {
        let moment = StateTensor { name: "exp_avg".into(), dtype: Dtype::F32, grain: 1, shape: shape.to_vec() };
        Record {
            name: name.into(),
            kind: Kind::Parameter,
            unit: 0,
            dtype: Dtype::F32,
            shape: shape.to_vec(),
            order: vec![],
            spill: None,
            format: Format::Plain,
            state: vec![moment],
        }
    }

    fn description(records: Vec<Record>) -> Description {
        Description {
            chunk_elements: 2048,
            user_bytes_max: 4096,
            hyperparameters_bytes_max: 4096,
            optimizer: "AdamW".into(),
            units: vec!["all".into()],
            records,
            first_elements: vec![],
        }
    }

    fn layers(count: usize) -> Vec<Record> {
        (0..count).map(|index| record(&format!("layers.{index}.weight"), &[4, 4])).collect()
    }

    fn described(there: &Description, wanted: &Description) -> String {
        there.difference(wanted).unwrap_or_default()
    }

    #[test]
    fn difference_names_missing_and_extra_records() {
        let mut other = layers(12);
        other.rotate_left(1);
        let names = "\"layers.8.weight\", \"layers.9.weight\", \"layers.10.weight\" and 1 more";
        let missing = described(&description(layers(8)), &description(other));
        assert!(missing.contains(&format!("it is missing 4 records: {names}")), "{missing}");
        let extra = described(&description(layers(9)), &description(layers(8)));
        assert_eq!(extra, "it has 1 record: \"layers.8.weight\", which the model does not have");
    }

    type Change = fn(&mut Description);

    #[test]
    fn difference_names_the_changed_field_and_counts_further_records() {
        let there = description(layers(3));
        assert_eq!(there.difference(&there.clone()), None);
        let changed: [(Change, &str); 10] = [
            (|wanted| wanted.records.swap(0, 1), "another order"),
            (
                |wanted| wanted.records[0].shape = vec![8, 4],
                "shape of \"layers.0.weight\" is [4, 4] in the store, but this run needs [8,",
            ),
            (|wanted| wanted.records[1].dtype = Dtype::Bf16, "dtype of \"layers.1.weight\""),
            (|wanted| wanted.records[2].state.clear(), "layers.2.weight\" is [\"exp_avg float32 [4, 4]\"]"),
            (|wanted| wanted.records[1].kind = Kind::Buffer, "the kind of \"layers.1.weight\" is \"parameter\""),
            (|wanted| wanted.records[1].order = vec![1, 0], "order of the dimensions of \"layers.1.weight\""),
            (|wanted| wanted.records[1].spill = Some(Dtype::F32), "\"layers.1.weight\" spills gradients is not"),
            (|wanted| wanted.units[0] = "one".into(), "the unit of \"layers.0.weight\""),
            (|wanted| wanted.units.push("two".into()), "another order"),
            (|wanted| wanted.chunk_elements = 4096, "chunk_elements"),
        ];
        for (change, part) in changed {
            let mut wanted = there.clone();
            change(&mut wanted);
            let text = described(&there, &wanted);
            assert!(text.contains(part), "{text}");
            assert!(!text.contains("more records"), "{text}");
        }
        let buffers = layers(7).into_iter().map(|record| Record { kind: Kind::Buffer, ..record }).collect();
        let text = described(&description(layers(7)), &description(buffers));
        assert!(text.ends_with("; 4 more records differ"), "{text}");
    }

    #[test]
    fn difference_rejects_other_rows_of_a_shard() {
        let (whole, rows) = (description(layers(2)), |firsts: [u64; 2]| Description {
            first_elements: firsts.to_vec(),
            ..description(layers(2))
        });
        assert_eq!(rows([0, 8]).difference(&rows([0, 8])), None);
        assert!(described(&whole, &rows([0, 8])).starts_with("it has whole parameters"));
        assert!(described(&rows([0, 0]), &whole).contains("the rows of one of several ranks"));
        let wanted = "the first element of \"layers.1.weight\" is 0 in the store, but this run needs 8";
        assert_eq!(described(&rows([0, 0]), &rows([0, 8])), wanted);
        for odd in [vec![0], vec![0, 1 << 60]] {
            assert!(Description { first_elements: odd, ..whole.clone() }.check().is_err());
        }
        let bytes = rows([0, 8]).encode();
        assert_eq!(Description::decode(&bytes), Ok(rows([0, 8])));
        assert!(Description::decode(&bytes[..bytes.len() - 1]).is_err());
    }
}
