//! Functions about the client: whether its connection is encrypted, its identity, and disconnecting
//! it.

use std::ffi::{c_char, c_int};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr;
use std::sync::Arc;

use blockhaul_catalog::ClientCertificate;
use blockhaul_os::PeerCredentials;

use super::{failed, malloced};
use crate::context::{self, CallContext};

/// Whether the connection is encrypted.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_is_tls() -> c_int {
    match context::now() {
        Some(context) if context.client.is_some() => c_int::from(context.tls),
        _ => failed("nbdkit_is_tls: there is no connection", -1),
    }
}

/// Ends the connection: at once, or by refusing all later requests.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_disconnect(force: c_int) {
    let Some((context, fd)) = client_fd() else { return failed("there is no connection", ()) };
    let Some(client) = &context.client else { return };
    if force == 0 {
        return client.dismissal.refuse();
    }
    client.dismissal.cut();
    // Wakes the task that waits for the next request.
    // SAFETY: the descriptor is open while the context holds the stream.
    unsafe { libc::shutdown(fd, libc::SHUT_RD) };
}

/// The client's socket, kept open while the first part lives.
fn client_fd() -> Option<(Arc<CallContext>, c_int)> {
    let context = context::now()?;
    let fd = context.client.as_ref()?.stream.as_ref()?.as_fd().as_raw_fd();
    Some((context, fd))
}

/// # Safety
/// `address` and `len` are as for getpeername(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn nbdkit_peer_name(
    address: *mut libc::sockaddr,
    len: *mut libc::socklen_t,
) -> c_int {
    let Some(fd) = client_fd() else { return failed("the client has no socket", -1) };
    // SAFETY: the plugin's promise, and the descriptor is open.
    match unsafe { libc::getpeername(fd.1, address, len) } {
        0 => 0,
        _ => failed(
            format!("getpeername: {}", blockhaul_io::plain(&std::io::Error::last_os_error())),
            -1,
        ),
    }
}

fn peer_credentials() -> Option<PeerCredentials> {
    let context = context::now();
    let client = context.as_ref().and_then(|context| context.client.as_ref());
    let Some(stream) = client.and_then(|client| client.stream.as_ref()) else {
        return failed("the client has no socket", None);
    };
    match PeerCredentials::of_peer(stream.as_fd()) {
        Ok(Some(found)) => Some(found),
        Ok(None) => failed("the client's user is known on Unix sockets only", None),
        Err(error) => failed(format!("getsockopt: {}", blockhaul_io::plain(&error)), None),
    }
}

/// The client's process ID.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_pid() -> i64 {
    let Some(peer) = peer_credentials() else { return -1 };
    peer.pid.map_or_else(
        || failed("the client's process is in another PID namespace", -1),
        |pid| pid.into(),
    )
}

/// The client's user ID.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_uid() -> i64 {
    peer_credentials().map_or(-1, |peer| peer.uid.into())
}

/// The client's group ID.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_gid() -> i64 {
    peer_credentials().map_or(-1, |peer| peer.gid.into())
}

/// The client's security context (SELinux), to be freed by the plugin.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_security_context() -> *mut c_char {
    let Some(fd) = client_fd() else { return failed("the client has no socket", ptr::null_mut()) };
    let mut label = [0_u8; 1024];
    let mut len = label.len() as libc::socklen_t;
    let out = label.as_mut_ptr().cast();
    // SAFETY: `out` has space for `len` bytes, and the descriptor is open.
    let got =
        unsafe { libc::getsockopt(fd.1, libc::SOL_SOCKET, libc::SO_PEERSEC, out, &raw mut len) };
    if got != 0 {
        let error = std::io::Error::last_os_error();
        let why = format!("the client has no security context: {}", blockhaul_io::plain(&error));
        return failed(why, ptr::null_mut());
    }
    let label = &label[..label.len().min(len as usize)];
    let end = label.iter().position(|&byte| byte == 0).unwrap_or(label.len());
    malloced(&label[..end])
}

/// The subject of the client's certificate, to be freed by the plugin; empty without one.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_tls_dn() -> *mut c_char {
    certified(|certificate| &certificate.subject)
}

/// The issuer of the client's certificate, to be freed by the plugin; empty without one.
#[unsafe(no_mangle)]
extern "C" fn nbdkit_peer_tls_issuer_dn() -> *mut c_char {
    certified(|certificate| &certificate.issuer)
}

fn certified(name: impl Fn(&ClientCertificate) -> &String) -> *mut c_char {
    let context = context::now();
    let Some(client) = context.as_ref().and_then(|context| context.client.as_ref()) else {
        return failed("there is no connection", ptr::null_mut());
    };
    malloced(client.certificate.get().map_or(b"", |certificate| name(certificate).as_bytes()))
}
