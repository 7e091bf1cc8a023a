//! What dirty bitmaps must show.

use blockhaul::simulated::Running;

use crate::oracle::SECTOR;

/// The bitmaps of the served disk.
#[derive(Default)]
pub(super) struct Bitmaps(Vec<Kept>);

/// One bitmap.
struct Kept {
    name: String,
    /// The disk at the moment since which the bitmap shows differences.
    base: Vec<u8>,
    /// It outlives the server.
    persistent: bool,
    /// The server did not end in order since the bitmap was seen: it may be inconsistent.
    doubtful: bool,
}

impl Bitmaps {
    /// A bitmap has begun when the disk had these contents.
    pub(super) fn add(&mut self, name: &str, base: Vec<u8>, persistent: bool) {
        let name = name.to_string();
        self.0.push(Kept { name, base, persistent, doubtful: false });
    }

    /// It shows differences from these contents from now on.
    pub(super) fn rebase(&mut self, name: &str, base: Vec<u8>) {
        for kept in self.0.iter_mut().filter(|kept| kept.name == name) {
            kept.base = base.clone();
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

    /// Checks that every byte of the disk that differs is in a dirty block. `but`: a bitmap that is
    /// not checked.
    pub(super) fn check(
        &mut self,
        export: &Running,
        now: &[u8],
        but: Option<&str>,
    ) -> Result<(), String> {
        for kept in self.0.iter_mut().filter(|kept| Some(&*kept.name) != but) {
            kept.check(export, now)?;
        }
        // What is inconsistent can only be removed.
        self.0.retain(|kept| !kept.doubtful);
        Ok(())
    }
}

impl Kept {
    fn check(&mut self, export: &Running, now: &[u8]) -> Result<(), String> {
        let name = &self.name;
        match export.bitmap(name) {
            Ok(bitmap) => {
                self.doubtful = false;
                self.covers(&bitmap.ranges(), now)
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
        let sectors = now.chunks(SECTOR).zip(self.base.chunks(SECTOR)).enumerate();
        for (sector, _) in sectors.filter(|(_, (now, base))| now != base) {
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
