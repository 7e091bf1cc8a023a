//! What dirty bitmaps must show.

use blockhaul_jobs::OpenExport;

use crate::oracle::SECTOR;

/// The bitmaps of the served disk.
#[derive(Default)]
pub(super) struct Bitmaps(Vec<BitmapRecord>);

/// The disk at the moment since which a bitmap shows differences.
#[derive(Clone)]
pub(super) struct BitmapBaseline {
    pub(super) contents: Vec<u8>,
    /// Sectors that requests of a lost connection could change after that moment, unseen by the bitmap: they
    /// are carried out by another server.
    pub(super) unsettled: Vec<usize>,
}

/// One bitmap.
struct BitmapRecord {
    name: String,
    base: BitmapBaseline,
    /// It outlives the server.
    persistent: bool,
    /// The server did not end in order since the bitmap was seen: it may be inconsistent.
    doubtful: bool,
    /// A job has taken what was dirty: it shows that again, or differences from a later moment.
    frozen: bool,
}

impl Bitmaps {
    /// A bitmap has begun when the disk had these contents. `doubtful`: its server has ended since.
    pub(super) fn add(
        &mut self,
        name: &str,
        base: BitmapBaseline,
        persistent: bool,
        doubtful: bool,
    ) {
        let name = name.to_string();
        self.0.push(BitmapRecord { name, base, persistent, doubtful, frozen: false });
    }

    /// A job takes what is dirty.
    pub(super) fn take(&mut self, name: &str) {
        self.0.iter_mut().filter(|kept| kept.name == name).for_each(|kept| kept.frozen = true);
    }

    /// That job has ended; if it is complete, the bitmap shows differences from these contents.
    pub(super) fn give_back(&mut self, name: &str, base: Option<BitmapBaseline>) {
        for kept in self.0.iter_mut().filter(|kept| kept.name == name) {
            kept.frozen = false;
            if let Some(base) = &base {
                kept.base = base.clone();
            }
        }
    }

    /// The disk has lost what somebody believed to be on it, under a server that still runs.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// The server has ended, in order or not.
    pub(super) fn server_has_ended(&mut self, in_order: bool) {
        self.0.retain(|kept| kept.persistent);
        self.0.iter_mut().for_each(|kept| kept.doubtful |= !in_order);
    }

    /// Whether a bitmap can be used.
    pub(super) fn is_sound(&self, name: &str) -> bool {
        self.0.iter().any(|kept| kept.name == name && !kept.doubtful)
    }

    /// Checks that every byte of the disk that differs is in a dirty block.
    pub(super) fn check(&mut self, export: &OpenExport, now: &[u8]) -> Result<(), String> {
        for kept in &mut self.0 {
            kept.check(export, now)?;
        }
        // What is inconsistent can only be removed.
        self.0.retain(|kept| !kept.doubtful);
        Ok(())
    }
}

impl BitmapRecord {
    fn check(&mut self, export: &OpenExport, now: &[u8]) -> Result<(), String> {
        let name = &self.name;
        match export.bitmap(name) {
            Ok(bitmap) => {
                self.doubtful = false;
                if self.frozen { Ok(()) } else { self.covers(&bitmap.ranges(), now) }
            }
            Err(_) if export.inconsistent().iter().any(|(other, _)| other == name) => {
                if self.doubtful {
                    Ok(())
                } else {
                    Err(format!("bitmap {name} is inconsistent after a server that ended in order"))
                }
            }
            Err(why) => Err(format!("bitmap {name} is gone: {why}")),
        }
    }

    fn covers(&self, dirty: &[(u64, u64)], now: &[u8]) -> Result<(), String> {
        let sectors = now.chunks(SECTOR).zip(self.base.contents.chunks(SECTOR)).enumerate();
        let changed = sectors.filter(|(_, (now, base))| now != base);
        for (sector, _) in changed.filter(|(sector, _)| !self.base.unsettled.contains(sector)) {
            let at = (sector * SECTOR) as u64;
            if !dirty.iter().any(|(from, len)| (*from..from + len).contains(&at)) {
                let name = &self.name;
                return Err(format!(
                    "sector {sector} has changed, but bitmap {name} shows {dirty:?}"
                ));
            }
        }
        Ok(())
    }
}
