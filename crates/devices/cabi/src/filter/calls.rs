//! Calls that begin at a backend of the chain, and go down it as far as filters pass them on: the
//! configuration, and what happens before a backend is opened.

use std::ffi::{CStr, c_char, c_int};

use super::abi::{Backends, Filter};
use super::bottom;
use super::chain::known;
use crate::api::text;
use crate::context;
use crate::lists::ExportList;

/// Offers a parameter to a backend, and to those below if it passes it on.
///
/// # Safety
/// `backend` is one of the chain's, key and value are C strings that are never freed.
pub(super) unsafe extern "C" fn config(
    backend: Backends,
    key: *const c_char,
    value: *const c_char,
) -> c_int {
    // SAFETY: the caller's promise.
    let backend = unsafe { known(backend) };
    log::debug!("{}: config", backend.name());
    // SAFETY: as above.
    unsafe {
        match &backend.filter {
            Some(Filter { config: Some(call), .. }) => call(config, backend.next(), key, value),
            Some(_) => config(backend.next(), key, value),
            None => bottom::config(key, value),
        }
    }
}

/// # Safety
/// `backend` is one of the chain's.
pub(super) unsafe extern "C" fn config_complete(backend: Backends) -> c_int {
    // SAFETY: the caller's promise.
    let backend = unsafe { known(backend) };
    // SAFETY: as above.
    unsafe {
        match &backend.filter {
            Some(Filter { config_complete: Some(call), .. }) => {
                call(config_complete, backend.next())
            }
            Some(_) => config_complete(backend.next()),
            None => bottom::config_complete(),
        }
    }
}

/// # Safety
/// `backend` is one of the chain's.
pub(super) unsafe extern "C" fn preconnect(backend: Backends, readonly: c_int) -> c_int {
    // SAFETY: the caller's promise.
    let backend = unsafe { known(backend) };
    log::debug!("{}: preconnect", backend.name());
    // SAFETY: as above.
    unsafe {
        match &backend.filter {
            Some(Filter { preconnect: Some(call), .. }) => {
                call(preconnect, backend.next(), readonly)
            }
            Some(_) => preconnect(backend.next(), readonly),
            None => bottom::preconnect(readonly),
        }
    }
}

/// Lists the exports of a backend; replaces placeholders for its default export by the name.
///
/// # Safety
/// `backend` is one of the chain's, `exports` a valid list.
pub(super) unsafe extern "C" fn list_exports(
    backend: Backends,
    readonly: c_int,
    exports: *mut ExportList,
) -> c_int {
    // SAFETY: the caller's promise.
    let own = unsafe { known(backend) };
    let tls = c_int::from(context::now().is_some_and(|context| context.tls));
    log::debug!("{}: list_exports readonly={readonly} tls={tls}", own.name());
    // SAFETY: as above.
    let result = unsafe {
        match &own.filter {
            Some(Filter { list_exports: Some(call), .. }) => {
                call(list_exports, own.next(), readonly, tls, exports)
            }
            Some(_) => list_exports(own.next(), readonly, exports),
            None => bottom::list_exports(readonly, tls, exports),
        }
    };
    // SAFETY: the caller's promise; the list has no other user meanwhile.
    let Some(exports) = (unsafe { exports.as_mut() }) else { return -1 };
    if result == -1 || exports.default_at.is_empty() {
        return result;
    }
    // SAFETY: the caller's promise; the name is null or a C string.
    let name = unsafe { text(default_export(backend, readonly)) };
    exports.resolve(name.as_deref());
    0
}

/// The name that the empty name stands for; null: there is none.
///
/// # Safety
/// `backend` is one of the chain's.
pub(super) unsafe extern "C" fn default_export(
    backend: Backends,
    readonly: c_int,
) -> *const c_char {
    // SAFETY: the caller's promise.
    let backend = unsafe { known(backend) };
    let current = context::now().filter(|context| context.client.is_some());
    if let Some(context) = &current {
        let kept = context.defaults.get(backend.index);
        if !kept.is_null() {
            return kept;
        }
    }
    let tls = c_int::from(context::now().is_some_and(|context| context.tls));
    log::debug!("{}: default_export readonly={readonly} tls={tls}", backend.name());
    // SAFETY: as above.
    let name = unsafe {
        match &backend.filter {
            Some(Filter { default_export: Some(call), .. }) => {
                call(default_export, backend.next(), readonly, tls)
            }
            Some(_) => default_export(backend.next(), readonly),
            None => bottom::default_export(readonly, tls),
        }
    };
    match current {
        Some(context) if !name.is_null() => {
            // SAFETY: not null: a C string.
            context.defaults.keep(backend.index, unsafe { CStr::from_ptr(name) }.to_owned())
        }
        _ => name,
    }
}
