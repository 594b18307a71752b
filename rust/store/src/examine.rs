//! Verifies both commits of a store, and lists the damage of each commit. Writes nothing.

use std::path::Path;

use crate::{
    Create, Error, Result, Store, Verified,
    newest::{NOT_CLOSED, Page, Progress, Roots},
    root::Root,
};

/// The largest number of errors that are kept for one commit. Further errors are only counted.
const DAMAGES_MAX: usize = 16;

/// The findings about one root: about the commit that the root names, or about the root itself if the root is damaged.
#[derive(Debug, Clone, Default)]
pub struct Examined {
    /// The generation of the commit; `None` if the root is damaged.
    pub generation: Option<u64>,
    /// The number of committed steps; `None` if the root or the catalog is damaged.
    pub step: Option<u64>,
    /// Counts the undamaged extents and the undamaged chunks of the log, and their bytes.
    pub whole: Verified,
    /// The first errors that were found in the commit or its root, at most `DAMAGES_MAX`.
    pub damages: Vec<Error>,
    /// The number of further errors, which are not in `damages`.
    pub others: u64,
}

impl Store {
    /// Reads and verifies every byte of both commits. The result lists the damaged roots first, because each of them
    /// may have been the newest root. Then it lists the commits of the whole roots, the newer commit first. `progress`
    /// receives the bytes done and the total, and returns `false` to stop.
    pub fn examine(paths: &[impl AsRef<Path>], how: &Create, progress: &mut Progress<'_>) -> Result<Vec<Examined>> {
        let (store, roots) = Self::prepare_at(paths, how)?;
        store.examine_roots(&roots, progress)
    }

    /// Does what [`Store::examine`] does, on an open volume of simulated devices.
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

    /// Opens a store for inspection, at its newest commit with a whole catalog. Nothing can be staged, and closing the
    /// store writes nothing.
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
        Err(refused
            .unwrap_or_else(|| Error::Invalid("the store has no undamaged root: restore the store from a copy".into())))
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
