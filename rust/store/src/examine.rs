//! Examines both commits of a store: which is whole, and where one is damaged. Writes nothing.

use std::path::Path;

use crate::{
    Create, Error, Result, Store, Verified,
    newest::{NOT_CLOSED, Page, Progress, Roots},
    root::Root,
};

/// Damages that are kept of a commit; the others are counted.
const DAMAGES_MAX: usize = 16;

/// A commit that a root names, or a root that names none any more.
#[derive(Debug, Clone, Default)]
pub struct Examined {
    /// Counts commits; unknown where the root is damaged.
    pub generation: Option<u64>,
    /// Committed steps; unknown where the catalog is damaged.
    pub step: Option<u64>,
    /// What is whole of it.
    pub whole: Verified,
    /// What is not, the first of it.
    pub damages: Vec<Error>,
    /// How many damages more there are.
    pub others: u64,
}

impl Store {
    /// Reads and checks every byte of both commits. What may be the newest comes first: a damaged root, or the newer one.
    pub fn examine(paths: &[impl AsRef<Path>], how: &Create, progress: &mut Progress<'_>) -> Result<Vec<Examined>> {
        let (store, roots) = Self::prepare_at(paths, how)?;
        store.examine_roots(&roots, progress)
    }

    /// The same on an open volume of simulated devices.
    #[cfg(feature = "sim")]
    pub fn examine_on(
        volume: memascend_nvme::Volume,
        stripe_bytes: u64,
        how: &Create,
        progress: &mut Progress<'_>,
    ) -> Result<Vec<Examined>> {
        let (store, roots) = Self::prepare_on(volume, stripe_bytes, how)?;
        store.examine_roots(&roots, progress)
    }

    /// Opens a store to be looked at, at its newest commit whose catalog is whole. Nothing can be staged, and nothing is
    /// written, also when it is closed.
    pub fn look(paths: &[impl AsRef<Path>], how: &Create) -> Result<Self> {
        let (store, roots) = Self::prepare_at(paths, how)?;
        let mut refused = None;
        for root in roots.whole() {
            match store.reload(&root) {
                Ok(()) => {
                    store.index.lock().close();
                    return Ok(store);
                }
                Err(error) => drop(refused.get_or_insert(error)),
            }
        }
        Err(refused.unwrap_or_else(|| Error::Invalid("the store has no root".into())))
    }

    fn examine_roots(&self, roots: &Roots, progress: &mut Progress<'_>) -> Result<Vec<Examined>> {
        let damaged = roots.pages.iter().filter_map(|page| match page {
            Page::Damaged(error) => Some(Examined { damages: vec![error.clone()], ..Examined::default() }),
            _ => None,
        });
        let mut examined: Vec<Examined> = damaged.collect();
        let whole = roots.whole();
        let (each, all) = (self.layout.slot_bytes(), self.layout.slot_bytes() * whole.len() as u64);
        for (root, before) in whole.iter().zip((0..).map(|index| index * each)) {
            examined.push(self.examine_root(root, &mut |done, _| progress(before + done, all))?);
        }
        Ok(examined)
    }

    fn examine_root(&self, root: &Root, progress: &mut Progress<'_>) -> Result<Examined> {
        let mut found = Examined { generation: Some(root.generation), ..Examined::default() };
        if let Err(error) = self.reload(root) {
            found.damages.push(error);
            return Ok(found);
        }
        found.step = Some(self.index.lock().step);
        if root.is_unclosed {
            found.damages.push(Error::Refused { path: self.path.clone(), why: NOT_CLOSED.into() });
        }
        let mut note = |error: Error| match error {
            Error::Corrupt { .. } | Error::Storage(_) if found.damages.len() < DAMAGES_MAX => {
                found.damages.push(error);
                Ok(())
            }
            Error::Corrupt { .. } | Error::Storage(_) => {
                found.others += 1;
                Ok(())
            }
            error => Err(error),
        };
        found.whole = self.verify_each(progress, &mut note)?;
        Ok(found)
    }
}
