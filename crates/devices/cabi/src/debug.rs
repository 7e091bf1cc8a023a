//! Global variables that enable debug messages of plugins and filters: nbdkit's `-D NAME.FLAG=N`
//! sets `int NAME_debug_FLAG` in the plugin or filter NAME.

use std::ffi::{CString, c_int};

use crate::load::SharedObject;

/// The flags to set, and which of them were found.
pub(crate) struct DebugFlags<'a> {
    flags: &'a [(String, String, i32)],
    used: Vec<bool>,
}

impl<'a> DebugFlags<'a> {
    pub(crate) fn new(flags: &'a [(String, String, i32)]) -> DebugFlags<'a> {
        DebugFlags { flags, used: vec![false; flags.len()] }
    }

    /// Sets the variables of a plugin or filter.
    pub(crate) fn set(&mut self, library: &SharedObject, name: &str) {
        for ((of, flag, value), used) in self.flags.iter().zip(&mut self.used) {
            if of != name {
                continue;
            }
            *used = true;
            let variable = format!("{}_debug_{flag}", name.replace(['-', '.'], "_"));
            let Ok(symbol) = CString::new(variable.as_str()) else { continue };
            let place = library.symbol(&symbol).cast::<c_int>();
            if place.is_null() {
                log::warn!(
                    "-D {of}.{flag}: {name} does not contain a global variable called {variable}"
                );
                continue;
            }
            // SAFETY: variables of such names are ints (nbdkit-plugin(3)), and not in use yet.
            unsafe { place.write(*value) };
        }
    }

    /// Warns about flags that were not found.
    pub(crate) fn warn(&self) {
        for ((of, flag, _), used) in self.flags.iter().zip(&self.used) {
            if !used && of != "nbdkit" {
                log::warn!("debug flag -D {of}.{flag} was not used");
            }
        }
    }
}
