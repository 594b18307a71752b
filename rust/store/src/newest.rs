//! Selects the commit to open: the newest commit or, on request, the commit before it.
//!
//! [Note: Going back] A damaged root may have been the newest, so an opening uses the other root only if the caller
//! passes `Existing::Previous`. `settle_on_previous` then verifies every byte of the other commit. After that,
//! `go_back` writes a mark over the page of the newer or damaged root, and only then can anything be staged. So a
//! process that is killed at any point leaves the store unchanged, or at that other commit.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use memascend_mem::Wait;
use memascend_nvme::Volume;

use crate::{
    Create, Description, Error, Existing, Result, Store,
    checksum::Uuid,
    index::{Index, Phase},
    label,
    layout::PAGE_BYTES,
    open::bytes_at,
    path::{PathState, look, refused, resolve},
    places::Devices,
    root::{self, Beside, Found, Root, Run},
};

/// A function that returns an error if the description found in a store is not the one that the caller expects.
pub(crate) type Fits<'a> = dyn Fn(&Description) -> Result<()> + 'a;
/// A function that receives the bytes verified so far and the total, and returns `false` to end the verification.
pub(crate) type Progress<'a> = dyn FnMut(u64, u64) -> bool + 'a;

/// The content of a root page.
#[derive(Debug, Clone)]
pub(crate) enum Page {
    /// No root and no mark of this store: zeros, an incomplete first write, or a root or mark of another store.
    Blank,
    /// A mark: the page holds no root.
    Marked,
    Whole(Root),
    /// The page is damaged, lost or unreadable.
    Damaged(Error),
}

impl Page {
    /// Returns what the next root states about this page in its field `beside`. A damaged page counts as marked,
    /// because [`Store::go_back`] writes a mark over it before the next root is written.
    fn beside(&self) -> Beside {
        match self {
            Self::Blank | Self::Damaged(_) | Self::Marked => Beside::Mark,
            Self::Whole(root) => Beside::Root(root.generation),
        }
    }
}

/// Both root pages of a store.
#[derive(Debug, Clone)]
pub(crate) struct Roots {
    pub(crate) pages: [Page; 2],
    path: Arc<Path>,
}

impl Roots {
    /// Reads both root pages. A blank page counts as damaged if the other root, or a second label, shows that the store
    /// had written to the page.
    pub(crate) fn read(volume: &Volume, devices: Devices, uuid: &Uuid, path: &Arc<Path>) -> Self {
        let page = |slot: u64| {
            let damaged = |why: String| damaged_page(devices, slot, path, why);
            match bytes_at(volume, devices.root_offset(slot), PAGE_BYTES).map(|page| root::read(&page, uuid)) {
                Ok(Ok(Found::Root(root))) if root.generation & 1 != slot => {
                    damaged("its root belongs in the other root page".into())
                }
                Ok(Ok(Found::Root(root))) => Page::Whole(*root),
                Ok(Ok(Found::Mark)) => Page::Marked,
                Ok(Ok(Found::Blank)) => Page::Blank,
                Ok(Err(why)) => damaged(why),
                Err(error) => Page::Damaged(error),
            }
        };
        let mut pages = [page(0), page(1)];
        if let Some((slot, why)) = lost(&pages) {
            pages[slot] = damaged_page(devices, slot as u64, path, why);
        }
        let rootless = pages.iter().all(|page| matches!(page, Page::Blank | Page::Marked));
        let blank = pages.iter().position(|page| matches!(page, Page::Blank));
        if let Some(slot) = blank.filter(|_| rootless && has_second_labels(volume, devices, uuid)) {
            pages[slot] = damaged_page(devices, slot as u64, path, EMPTIED.into());
        }
        Self { pages, path: Arc::clone(path) }
    }

    /// Returns the whole roots, the newer root first.
    pub(crate) fn whole(&self) -> Vec<Root> {
        let whole = |page: &Page| if let Page::Whole(root) = page { Some(root.clone()) } else { None };
        let mut roots: Vec<Root> = self.pages.iter().filter_map(whole).collect();
        roots.sort_by_key(|root| std::cmp::Reverse(root.generation));
        roots
    }

    fn named(&self) -> Vec<CommitId> {
        let named = |root: &Root| CommitId { generation: root.generation, run: root.run, kept: !root.is_unclosed };
        self.whole().iter().map(named).collect()
    }

    /// Returns the slot of the first damaged page, and the page's error. Returns `None` if no page is damaged.
    pub(crate) fn damaged(&self) -> Option<(u64, &Error)> {
        (0..)
            .zip(&self.pages)
            .find_map(|(slot, page)| if let Page::Damaged(error) = page { Some((slot, error)) } else { None })
    }

    /// Returns the newest whole root. Both roots name the same description.
    ///
    /// # Errors
    /// Fails if no root is whole: with the error of a damaged page, or with [`Error::Unfilled`] if no page is damaged.
    pub(crate) fn any(&self) -> Result<Root> {
        match (self.whole().first(), self.damaged()) {
            (Some(root), _) => Ok(root.clone()),
            (None, Some((_, error))) => Err(error
                .clone()
                .adding(&format!("; the other page has no whole root either, so there is no commit to open: {KEEP}"))),
            (None, None) => Err(Error::Unfilled { path: Arc::clone(&self.path) }),
        }
    }

    /// Returns the newest root. Fails if no root is whole, and if a page is damaged: the root in the damaged page may
    /// have been newer.
    fn newest(&self) -> Result<Root> {
        self.damaged().map_or_else(|| self.any(), |(_, error)| Err(error.clone()))
    }

    /// Returns the older of two whole roots or, if a page is damaged, the only whole root. Also returns the slot of the
    /// page that does not hold the returned root: [`Store::go_back`] writes a mark over this page.
    fn previous(&self) -> Result<(Root, u64)> {
        match (self.whole().as_slice(), self.damaged()) {
            ([_, older], _) if older.is_unclosed => refused(&self.path, NEVER_CLOSED),
            ([only], Some(_)) if only.is_unclosed => refused(&self.path, NEVER_CLOSED),
            ([newest, older, ..], _) => Ok((older.clone(), newest.generation & 1)),
            ([only], Some((slot, _))) => Ok((only.clone(), slot)),
            ([_], None) => Err(Error::Invalid(format!(
                "the store at {} holds one commit and none before it: open the store with existing=\"resume\"",
                self.path.display()
            ))),
            ([], _) => self.any().map(|root| (root, 0)),
        }
    }
}

/// True if any device has its second label. A new store writes its second labels only after it has written marks to
/// both root pages.
fn has_second_labels(volume: &Volume, devices: Devices, uuid: &Uuid) -> bool {
    (0..devices.count).any(|index| {
        let place = devices.second_label_offset(volume.size_bytes(), index);
        let page = place.and_then(|at| bytes_at(volume, at, PAGE_BYTES).ok());
        page.is_some_and(|page| matches!(label::read(&page), label::Found::Label(of) if of.uuid == *uuid))
    })
}

/// If one page is blank and the other page has a whole root, returns the slot of the blank page, and why this page
/// counts as damaged: when the root was written, the blank page held a mark or a root, as the root's field `beside`
/// states. The lost content may have been a newer root. In all other cases, returns `None`.
fn lost(pages: &[Page; 2]) -> Option<(usize, String)> {
    let (slot, root) = match pages {
        [Page::Blank, Page::Whole(root)] => (0, root),
        [Page::Whole(root), Page::Blank] => (1, root),
        _ => return None,
    };
    let was = match root.beside {
        Beside::Mark => "the mark of an empty page".to_owned(),
        Beside::Root(generation) => format!("generation {generation}"),
    };
    Some((slot, format!("it is blank, but {was} was there when the other root was written: this content is lost")))
}

fn damaged_page(devices: Devices, slot: u64, path: &Path, why: String) -> Page {
    Page::Damaged(Error::corrupt(path, "the root", (devices.root_offset(slot), PAGE_BYTES), why))
}

/// Identifies a commit, by the fields of its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommitId {
    /// The number of the commit in this store, from 1.
    pub generation: u64,
    /// The run of several ranks to which the commit belongs. All fields are zero if the run has one rank.
    pub run: Run,
    /// False if the root marks the store as unclosed (durability "none"): later commits in memory may have overwritten
    /// the commit.
    pub kept: bool,
}

impl Store {
    /// Returns the commits that the whole roots of a store name, the newest first, and the error of a damaged root, if
    /// there is one. The list of commits is empty if the store's first write did not finish, or if the store's file is
    /// empty. Returns `None` if the paths hold no store. Reads only labels, roots and the description. Writes nothing.
    pub fn commits(paths: &[impl AsRef<Path>], how: &Create) -> Result<Option<(Vec<CommitId>, Option<Error>)>> {
        let resolved: Vec<PathBuf> = paths.iter().map(|path| resolve(path.as_ref())).collect();
        match look(&resolved, None)? {
            PathState::Nothing => return Ok(None),
            PathState::Empty(_) => return Ok(Some((Vec::new(), None))),
            PathState::Store(_) | PathState::Unfilled | PathState::Unusable(_) => {}
        }
        match Self::prepare_at(paths, how) {
            Ok((_, roots)) => Ok(Some((roots.named(), roots.damaged().map(|(_, error)| error.clone())))),
            Err(Error::Unfilled { .. }) => Ok(Some((Vec::new(), None))),
            Err(error) => Err(error),
        }
    }

    /// Loads the catalog of the commit that `how.existing` selects, and checks that training can continue from this
    /// commit. Also calls [`Store::go_back`], unless `how.goes_back_later` is set.
    pub(crate) fn settle(
        &self,
        roots: &Roots,
        how: &Create,
        fits: &Fits<'_>,
        progress: &mut Progress<'_>,
    ) -> Result<()> {
        if how.existing == Existing::Previous {
            self.settle_on_previous(roots, fits, progress)?;
        } else {
            self.settle_on_newest(roots, fits).map_err(|error| self.advised(error, roots))?;
        }
        self.index.lock().root_pages = [roots.pages[0].beside(), roots.pages[1].beside()];
        if !how.goes_back_later {
            self.go_back()?;
        }
        self.note_damaged_copies()
    }

    fn settle_on_newest(&self, roots: &Roots, fits: &Fits<'_>) -> Result<()> {
        let root = roots.newest()?;
        if root.is_unclosed {
            return refused(&self.path, NOT_CLOSED);
        }
        self.load_table(&root)?;
        fits(&self.description)?;
        self.require_one_commit()
    }

    fn settle_on_previous(&self, roots: &Roots, fits: &Fits<'_>, progress: &mut Progress<'_>) -> Result<()> {
        let (root, newest) = roots.previous()?;
        self.load_table(&root)?;
        fits(&self.description)?;
        let step = self.index.lock().step;
        self.verify(progress).map_err(|error| {
            error.adding(&format!(
                "; it belongs to the previous commit, step {step}. A step after the newest commit has probably \
                 overwritten it, so existing=\"previous\" cannot open the previous commit. Nothing was changed: try \
                 existing=\"resume\", or restore the store from a copy"
            ))
        })?;
        // The verified bytes must be on storage, and not only in a device's cache, before `go_back` drops the other
        // root.
        self.volume.flush(Wait::forever())?;
        self.index.lock().phase = Phase::Previous { newest };
        Ok(())
    }

    /// If the store was opened with [`Existing::Previous`], overwrites the newer or damaged root with a mark, which
    /// drops the commit of that root permanently. Does nothing otherwise, or if an earlier call has dropped the commit.
    pub fn go_back(&self) -> Result<()> {
        let Phase::Previous { newest } = self.index.lock().phase else { return Ok(()) };
        self.mark_no_root(newest)?;
        self.index.lock().phase = Phase::Open;
        Ok(())
    }

    /// Appends a sentence to an error about the newest commit. The sentence says whether the catalog of the other
    /// commit is whole.
    fn advised(&self, error: Error, roots: &Roots) -> Error {
        let other = || -> Result<u64> {
            let (root, _) = roots.previous()?;
            self.reload(&root)?;
            Ok(self.index.lock().step)
        };
        let advice = match other() {
            Ok(step) => format!(
                "; the catalog of the previous commit, step {step}, is whole: existing=\"previous\" opens that commit \
                 if the rest of it is whole, too. Run `memascend store verify` to check the rest"
            ),
            Err(_) => "; no other commit is whole".into(),
        };
        error.adding(&advice)
    }

    /// Discards the loaded catalog, and loads the catalog of the commit that `root` names.
    pub(crate) fn reload(&self, root: &Root) -> Result<()> {
        *self.index.lock() = Index::new(&self.description, &self.layout, &self.sections);
        self.load_table(root)
    }

    /// Writes a mark over the root page of `slot`, durably: the page holds no root from then on.
    pub(crate) fn mark_no_root(&self, slot: u64) -> Result<()> {
        self.write_root_page(slot, &root::mark(&self.uuid))?;
        self.index.lock().root_pages[slot as usize] = Beside::Mark;
        Ok(())
    }
}

const EMPTIED: &str = "it is blank, but the store has second labels, which are written after this page: the content of \
                       the page is lost";

/// Advice for a store that had commits, if no commit can be found.
pub(crate) const KEEP: &str = "keep this store and restore it from a copy, or start from a checkpoint with a store \
                               on another path. existing=\"replace\" would overwrite all that is left of this store";

pub(crate) const NOT_CLOSED: &str = "the store was not closed, and its run had durability=\"none\", which saves \
                                     nothing before close(): pass existing=\"replace\" to start again";

const NEVER_CLOSED: &str = "the previous commit is of a run with durability=\"none\" and was never closed, so it was \
                            not saved, and existing=\"previous\" cannot open it: try existing=\"resume\", or restore \
                            the store from a copy";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_reports_a_blank_page_whose_root_the_other_root_names() {
        let beside = |beside| Page::Whole(Root { generation: 3, beside, ..Root::default() });
        assert_eq!(lost(&[Page::Blank, Page::Blank]), None);
        assert_eq!(lost(&[Page::Marked, beside(Beside::Root(2))]), None);
        let (slot, why) = lost(&[Page::Blank, beside(Beside::Root(2))]).unwrap_or_default();
        assert!(slot == 0 && why.contains("generation 2 was"), "{why}");
        let (slot, why) = lost(&[beside(Beside::Mark), Page::Blank]).unwrap_or_default();
        assert!(slot == 1 && why.contains("mark"), "{why}");
    }
}
