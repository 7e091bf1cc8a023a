//! State of a layer for a disk, shared by all handles to the same storage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockhaul_block::{Can, Error, Kind, Result};
use blockhaul_catalog::LayerBase;

/// Maximum number of disks whose state outlives their handles: each has a temporary file.
const KEPT_MAX: usize = 1000;

/// One value for each disk with open handles.
pub struct PerDisk<T>(Mutex<HashMap<String, Weak<T>>>);

impl<T> Default for PerDisk<T> {
    fn default() -> PerDisk<T> {
        PerDisk(Mutex::default())
    }
}

impl<T> PerDisk<T> {
    /// The value, if a handle to the same storage has it now.
    pub fn known(&self, below: &LayerBase) -> Option<Arc<T>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Self::key(below).and_then(|key| all.get(&key)).and_then(Weak::upgrade)
    }

    /// Like [`PerDisk::get`], if handles of the same name are taken to show the same disk.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn of_name(&self, below: &LayerBase, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        self.of_key(key_of_name(below), make)
    }

    /// The key of a disk; `None`: each handle may have a disk of its own.
    fn key(below: &LayerBase) -> Option<String> {
        let may_differ =
            below.export.is_some() && !below.device.facts().can.contains(Can::MULTI_CONN);
        (!may_differ).then(|| key_of_name(below))
    }

    /// The value for what a layer is put over: made by the first handle.
    ///
    /// Devices opened per client share it only if the name is the same and the device promises that
    /// all of its connections show the same disk; otherwise each client may have its own disk.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get(&self, below: &LayerBase, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let Some(key) = Self::key(below) else { return make().map(Arc::new) };
        self.of_key(key, make)
    }

    fn of_key(&self, key: String, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = all.get(&key).and_then(Weak::upgrade) {
            return Ok(value);
        }
        all.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(make()?);
        all.insert(key, Arc::downgrade(&value));
        Ok(value)
    }
}

/// The key of a disk by its name, and by its files: another file may have taken the name.
fn key_of_name(below: &LayerBase) -> String {
    let Some(name) = &below.export else { return String::new() };
    format!("/{name}/{:?}", below.device.facts().files)
}

/// One value for each disk, by its name and files, that outlives its handles: what clients have stored is there when
/// they connect again.
pub(crate) struct KeptPerDisk<T> {
    values: Mutex<HashMap<String, Arc<T>>>,
    /// Whether a value without handles holds what cannot be made again.
    is_needed: fn(&T) -> bool,
}

impl<T> KeptPerDisk<T> {
    pub(crate) fn new(is_needed: fn(&T) -> bool) -> KeptPerDisk<T> {
        KeptPerDisk { values: Mutex::default(), is_needed }
    }

    /// The value for what a layer is put over: made by the first handle.
    ///
    /// # Errors
    /// Those of `make`; [`Kind::NoSpace`] if [`KEPT_MAX`] values are needed.
    pub(crate) fn get(
        &self,
        below: &LayerBase,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let mut all = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, value| Arc::strong_count(value) > 1 || (self.is_needed)(value));
        let key = key_of_name(below);
        if let Some(value) = all.get(&key) {
            return Ok(value.clone());
        }
        if all.len() >= KEPT_MAX {
            let text = format!("the changes of {KEPT_MAX} exports are kept already");
            return Err(Error::new(Kind::NoSpace, text));
        }
        let value = Arc::new(make()?);
        all.insert(key, value.clone());
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use blockhaul_block::Facts;
    use blockhaul_testkit::model::{CompletionOrder, Model, ModelDevice};

    use super::*;

    /// A handle that a client has opened by this name, of the file with this number.
    fn below_of(name: &str, file: u64) -> LayerBase {
        let export = Some(name.to_string());
        let facts = Facts { files: vec![(1, file)], ..Model::all_facts(512) };
        let device = ModelDevice::new(Model::with_facts(facts), CompletionOrder::Immediate);
        LayerBase { export, ..LayerBase::alone(device) }
    }

    fn below(name: &str) -> LayerBase {
        below_of(name, 7)
    }

    #[test]
    fn another_file_of_the_name_is_another_disk() {
        let kept = KeptPerDisk::new(|_: &u64| true);
        let get = |file| kept.get(&below_of("a", file), || Ok(file)).map(|value| *value);
        assert_eq!([7, 8, 7].map(|file| get(file).unwrap()), [7, 8, 7]);
    }

    #[test]
    fn what_is_needed_outlives_its_handles_up_to_a_limit() {
        let kept = KeptPerDisk::new(|needed: &bool| *needed);
        let get = |name: &str, needed| kept.get(&below(name), || Ok(needed));
        assert!(*get("a", true).unwrap());
        assert!(*get("a", false).unwrap(), "it is the first one");
        assert!(!*get("b", false).unwrap());
        assert!(*get("b", true).unwrap(), "the first one was not needed");
        for number in 2..KEPT_MAX {
            get(&number.to_string(), true).unwrap();
        }
        let refused = get("c", false).err().map(|error| error.kind());
        assert_eq!(refused, Some(Kind::NoSpace));
        assert!(*get("a", false).unwrap());
    }
}
