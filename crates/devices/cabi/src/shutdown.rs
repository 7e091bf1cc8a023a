//! Which server a plugin stops with `nbdkit_shutdown()`.
//!
//! That function has no argument, and a plugin may call it on any thread. In a callback, the
//! context of the thread names the server. A plugin's own threads have no context, and the host
//! does not know them: so the function checks from which shared object it was called. That needs a
//! table for the process, which can load each shared object only once.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard};

use blockhaul_catalog::Shutdown;

use crate::context;
use crate::load::Library;

/// By the load address of a shared object.
static SERVERS: Mutex<BTreeMap<usize, Shutdown>> = Mutex::new(BTreeMap::new());

fn servers() -> MutexGuard<'static, BTreeMap<usize, Shutdown>> {
    SERVERS.lock().expect("no panic under this lock")
}

/// While it lives, calls from shared objects reach a server.
pub(crate) struct Heard {
    shutdown: Shutdown,
    objects: Vec<usize>,
}

impl Heard {
    /// Calls will reach this server.
    pub(crate) fn by(shutdown: Shutdown) -> Heard {
        Heard { shutdown, objects: Vec::new() }
    }

    /// Adds calls from this shared object.
    pub(crate) fn from(&mut self, library: &Library) {
        if let Some(object) = library.symbol_of_init().and_then(object_of) {
            servers().insert(object, self.shutdown.clone());
            self.objects.push(object);
        }
    }
}

impl Drop for Heard {
    fn drop(&mut self) {
        let mut servers = servers();
        for object in &self.objects {
            // The object stays loaded, and may have left threads behind: their calls are only
            // logged.
            servers.insert(*object, Shutdown::default());
        }
    }
}

/// The load address of the shared object that contains this address.
fn object_of(address: *const c_void) -> Option<usize> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address is valid as an argument, and the pointer is to live memory of the right
    // type.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: all zeroes is a valid value of this plain structure of pointers.
    let found = unsafe { found.assume_init() };
    known.then(|| found.dli_fbase.addr())
}

/// Stops the server of a plugin: `caller` is an address in the calling code.
pub(crate) fn request(caller: *const c_void) {
    let context = context::now();
    if let Some(context) = &context
        && let Some(shutdown) = &context.shutdown
    {
        return shutdown.request(&format!("plugin {} asks for it", context.plugin));
    }
    let found: Vec<_> = {
        let servers = servers();
        match object_of(caller).and_then(|object| servers.get(&object)) {
            Some(shutdown) => vec![shutdown.clone()],
            // A library used by an unknown plugin: stop all.
            None => servers.values().cloned().collect(),
        }
    };
    found.iter().for_each(|shutdown| shutdown.request("a thread of a plugin asks for it"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_belong_to_the_object_that_holds_them() {
        let own = object_of(addresses_belong_to_the_object_that_holds_them as *const c_void);
        assert!(own.is_some());
        assert_eq!(own, object_of(object_of as *const c_void));
        assert_ne!(own, object_of(libc::strlen as *const c_void));
        assert_eq!(object_of(std::ptr::null()), None);
    }
}
