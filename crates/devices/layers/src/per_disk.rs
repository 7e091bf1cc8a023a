//! State of a layer for a disk, shared by all handles to the same storage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blockhaul_block::{Can, Result};
use blockhaul_catalog::Below;

/// One value for each disk with open handles.
pub struct PerDisk<T>(Mutex<HashMap<String, Weak<T>>>);

impl<T> Default for PerDisk<T> {
    fn default() -> PerDisk<T> {
        PerDisk(Mutex::default())
    }
}

impl<T> PerDisk<T> {
    /// The value, if a handle to the same storage has it now.
    pub fn known(&self, below: &Below) -> Option<Arc<T>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Self::key(below).and_then(|key| all.get(&key)).and_then(Weak::upgrade)
    }

    /// Like [`PerDisk::get`], if handles of the same name are known to show the same disk.
    pub fn of_name(&self, below: &Below, make: impl FnOnce() -> T) -> Arc<T> {
        let key = below.export.as_ref().map_or_else(String::new, |name| format!("/{name}"));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = all.get(&key).and_then(Weak::upgrade) {
            return value;
        }
        all.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(make());
        all.insert(key, Arc::downgrade(&value));
        value
    }

    /// The key of a disk; `None`: each handle may have a disk of its own.
    fn key(below: &Below) -> Option<String> {
        match &below.export {
            None => Some(String::new()),
            Some(_) if !below.device.facts().can.contains(Can::MULTI_CONN) => None,
            Some(name) => Some(format!("/{name}")),
        }
    }

    /// The value for what a layer is put over: made by the first handle.
    ///
    /// Devices opened per client share it only if the name is the same and the device promises that
    /// all of its connections show the same disk; otherwise each client may have its own disk.
    pub fn get(&self, below: &Below, make: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let Some(key) = Self::key(below) else { return make().map(Arc::new) };
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
