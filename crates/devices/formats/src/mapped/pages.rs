//! Pages of tables, shared by all handles to an image, in a bounded amount of memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use blockhaul_block::{Device, Error, Result};
use blockhaul_io::RangeLocks;

use super::errors::damaged;
use crate::bytes::{array, index};
use crate::storage::read;

/// Length of a page in bytes. Tables begin at sectors, so that no entry is in two pages.
const PAGE: u64 = 64 << 10;

type Page = Arc<[u8]>;

/// A page: the number of its file, and its offset there.
pub(super) type Key = (usize, u64);

/// The pages that were used lately.
pub(super) struct TablePages {
    format: &'static str,
    /// Length in bytes of each file.
    lens: Vec<u64>,
    /// Maximum number of pages in a generation.
    most: usize,
    generations: Mutex<PageGenerations>,
    /// One task reads a page at a time; others wait for it.
    loading: Arc<RangeLocks>,
}

/// When the young generation is full, it becomes the old one, whose pages are dropped.
#[derive(Default)]
struct PageGenerations {
    young: HashMap<Key, Page>,
    old: HashMap<Key, Page>,
}

impl TablePages {
    /// A cache of at most `memory` bytes; at least four pages.
    pub(super) fn new(format: &'static str, lens: Vec<u64>, memory: u64) -> TablePages {
        let most = usize::try_from(memory / PAGE / 2).unwrap_or(usize::MAX).max(2);
        TablePages { format, lens, most, generations: Mutex::default(), loading: Arc::default() }
    }

    fn find(&self, key: Key) -> Option<Page> {
        let mut all = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = all.young.get(&key) {
            return Some(page.clone());
        }
        let page = all.old.remove(&key)?;
        self.keep(&mut all, key, page.clone());
        Some(page)
    }

    fn keep(&self, all: &mut PageGenerations, key: Key, page: Page) {
        if all.young.len() >= self.most {
            all.old = std::mem::take(&mut all.young);
        }
        all.young.insert(key, page);
    }

    /// A page, from memory or the file.
    pub(super) async fn load(&self, files: &[Arc<dyn Device>], key: Key) -> Result<Page> {
        if let Some(page) = self.find(key) {
            return Ok(page);
        }
        let (file, at) = key;
        let _turn = self.loading.lock(at, at.saturating_add(1)).await;
        if let Some(page) = self.find(key) {
            return Ok(page);
        }
        let device = files.get(file).ok_or_else(Error::misfit)?;
        let len = self.lens.get(file).copied().unwrap_or(0);
        let page: Page = Arc::from(&read(device, at, PAGE.min(len.saturating_sub(at))).await?[..]);
        let mut all = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        self.keep(&mut all, key, page.clone());
        Ok(page)
    }
}

/// A look at tables that are in memory, which notes the page that is missing.
pub(crate) struct TableLookup<'a> {
    pages: &'a TablePages,
    /// The pages used last: tables of two levels take turns.
    last: [Option<(Key, Page)>; 2],
    pub(super) missing: Option<Key>,
}

impl<'a> TableLookup<'a> {
    pub(super) fn new(pages: &'a TablePages) -> TableLookup<'a> {
        TableLookup { pages, last: [None, None], missing: None }
    }

    /// Adds a page that was read, as the cache may have dropped it already.
    pub(super) fn add(&mut self, key: Key, page: Page) {
        self.last.swap(0, 1);
        self.last[0] = Some((key, page));
        self.missing = None;
    }

    /// The bytes of a file from an offset on to the end of its page; `None` if the page is missing.
    ///
    /// # Errors
    /// If the offset is beyond the end of the file.
    pub(crate) fn bytes(&mut self, file: usize, at: u64) -> Result<Option<&[u8]>> {
        let len = self.pages.lens.get(file).copied().unwrap_or(0);
        if at >= len {
            let text =
                format!("a table reaches to offset {at}, beyond the {len} bytes of the file");
            return Err(damaged(self.pages.format, text));
        }
        let key = (file, at / PAGE * PAGE);
        let place = self.last.iter().position(|slot| matches!(slot, Some((is, _)) if *is == key));
        let place = match place {
            Some(place) => place,
            None => match self.pages.find(key) {
                Some(page) => {
                    self.add(key, page);
                    0
                }
                None => {
                    self.missing = Some(key);
                    return Ok(None);
                }
            },
        };
        let page = self.last[place].as_ref().map(|(_, page)| page);
        Ok(page.and_then(|page| page.get(index(at - key.1)..)))
    }

    /// A number of `N` bytes at an offset that is a multiple of `N`.
    ///
    /// # Errors
    /// If it is beyond the end of the file.
    pub(crate) fn number<const N: usize>(
        &mut self,
        file: usize,
        at: u64,
    ) -> Result<Option<[u8; N]>> {
        let format = self.pages.format;
        let Some(bytes) = self.bytes(file, at)? else { return Ok(None) };
        match array(bytes, 0) {
            Some(number) => Ok(Some(number)),
            None => Err(damaged(format, format!("the file ends within an entry at offset {at}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn used_pages_stay_and_memory_is_bounded() {
        let pages = TablePages::new("test", vec![u64::MAX], 8 * PAGE);
        for number in 0..100_u64 {
            let page: Page = Arc::from([0]);
            pages.keep(&mut pages.generations.lock().unwrap(), (0, number * PAGE), page);
            assert!(pages.find((0, 0)).is_some(), "used after each of the others");
            let all = pages.generations.lock().unwrap();
            assert!(all.young.len() + all.old.len() <= 8);
        }
        assert!(pages.find((0, 50 * PAGE)).is_none());
    }
}
