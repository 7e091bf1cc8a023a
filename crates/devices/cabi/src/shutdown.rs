//! Which server a plugin means that asks for the end of its server.
//!
//! `nbdkit_shutdown()` has no argument, and a plugin may call it on any thread. In a callback the context of the
//! thread says for which server the plugin was opened. Threads of a plugin's own have no context, and there is
//! nothing by which the host could know them: so the function looks from which shared object it was called. That
//! needs a table for the process. Shared objects are the process's, too, which holds each plugin only once.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard};

use blockhaul_catalog::Shutdown;

use crate::context;

/// By the address at which a shared object begins.
static SERVERS: Mutex<BTreeMap<usize, Shutdown>> = Mutex::new(BTreeMap::new());

fn servers() -> MutexGuard<'static, BTreeMap<usize, Shutdown>> {
    SERVERS.lock().expect("no panic under this lock")
}

/// While it lives, calls out of shared objects reach a server.
pub(crate) struct ShutdownRegistration {
    shutdown: Shutdown,
    objects: Vec<usize>,
}

impl ShutdownRegistration {
    /// Calls shall reach this server.
    pub(crate) fn by(shutdown: Shutdown) -> ShutdownRegistration {
        ShutdownRegistration { shutdown, objects: Vec::new() }
    }

    /// Those out of the shared object that holds this address.
    pub(crate) fn from(&mut self, address: *const c_void) {
        if let Some(object) = object_of(address) {
            servers().insert(object, self.shutdown.clone());
            self.objects.push(object);
        }
    }
}

impl Drop for ShutdownRegistration {
    fn drop(&mut self) {
        let mut servers = servers();
        for object in &self.objects {
            // The object stays where it is, and may have left threads behind: their calls are ignored.
            servers.insert(*object, Shutdown::default());
        }
    }
}

/// The address at which the shared object begins that holds this one.
fn object_of(address: *const c_void) -> Option<usize> {
    let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about, and the pointer is to live memory of the right type.
    let known = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
    // SAFETY: all zeroes is a valid value of this plain structure of pointers.
    let found = unsafe { found.assume_init() };
    known.then(|| found.dli_fbase.addr())
}

/// Asks the server of a plugin to stop: `caller` is an address in the code that asks.
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
            // A library that a plugin uses, whose plugin is not known: all may be meant.
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
