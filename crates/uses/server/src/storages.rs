//! Which connections share a storage, so that a failed flush of one is reported to all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use blockhaul_block::Flushes;

/// Number of entries up to which unused ones are not searched for.
const ENTRIES: usize = 64;

/// The flushes of each export whose clients have separate devices.
#[derive(Default)]
pub(crate) struct StorageFlushes(Mutex<FlushTable>);

#[derive(Default)]
struct FlushTable {
    open: HashMap<String, Weak<Flushes>>,
    /// Number of entries from which on unused ones are dropped.
    full: usize,
}

impl StorageFlushes {
    /// The flushes of an export. They are dropped after the last connection that uses them has
    /// ended.
    pub(crate) fn flushes(&self, export: &str) -> Arc<Flushes> {
        let mut guard = self.0.lock().expect("no panic under this lock");
        let table = &mut *guard;
        if let Some(flushes) = table.open.get(export).and_then(Weak::upgrade) {
            return flushes;
        }
        // Clients may make up names.
        if table.open.len() >= table.full.max(ENTRIES) {
            table.open.retain(|_, flushes| flushes.strong_count() > 0);
            table.full = 2 * table.open.len();
        }
        let flushes = Arc::<Flushes>::default();
        table.open.insert(export.to_string(), Arc::downgrade(&flushes));
        flushes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_share_the_flushes_of_an_export_until_the_last_has_ended() {
        let storages = StorageFlushes::default();
        let one = storages.flushes("a");
        assert!(Arc::ptr_eq(&one, &storages.flushes("a")));
        assert!(!Arc::ptr_eq(&one, &storages.flushes("b")));
        let before = Arc::downgrade(&one);
        drop(one);
        assert!(!Weak::ptr_eq(&before, &Arc::downgrade(&storages.flushes("a"))));
    }

    #[test]
    fn names_that_nobody_uses_are_dropped() {
        let storages = StorageFlushes::default();
        let used: Vec<_> = (0..50).map(|name| storages.flushes(&name.to_string())).collect();
        for name in 0..10_000 {
            drop(storages.flushes(&format!("made up {name}")));
        }
        let table = storages.0.lock().unwrap();
        assert!(table.open.len() <= 2 * ENTRIES, "{}", table.open.len());
        assert_eq!(used.iter().filter(|flushes| Arc::strong_count(flushes) == 1).count(), 50);
    }
}
