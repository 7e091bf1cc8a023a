//! `fusermount3`, which may mount for users without rights.
//!
//! It opens the FUSE device, mounts, and sends the descriptor through a socket whose number it finds
//! in an environment variable. Here the socket is its standard input.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};

use super::error::MountError;
use super::table;
use crate::files::Permissions;

/// Its names, in order of preference.
const NAMES: [&str; 2] = ["fusermount3", "fusermount"];
/// Maximum length of a read in bytes, however a disk is mounted: so much can stay in the kernel on its way
/// from a socket or file ([`blockhaul_io::ParkedPayload`]).
pub(super) const READ_MAX: u32 = 512 << 10;
/// Where it finds the number of the socket.
const VARIABLE: &str = "_FUSE_COMMFD";

/// The program that is installed.
fn program() -> Option<&'static str> {
    NAMES.into_iter().find(|name| {
        let tried = Command::new(name).arg("-V").stdin(Stdio::null()).output();
        tried.is_ok_and(|output| output.status.success())
    })
}

/// Whether it is installed.
pub(super) fn exists() -> bool {
    program().is_some()
}

fn needed() -> Result<&'static str, MountError> {
    let text = "only root may mount without fusermount3: install it (package fuse3)";
    program().ok_or_else(|| MountError(text.into()))
}

/// Mounts on `path`; returns the connection to the kernel.
pub(super) fn mount(
    path: &Path,
    source: &str,
    allowed: &Permissions,
) -> Result<OwnedFd, MountError> {
    let name = needed()?;
    let cannot = |why: String| MountError(format!("cannot mount on {}: {why}", path.display()));
    let system = |error: rustix::io::Errno| cannot(error.to_string());
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(system)?;
    let ran = Command::new(name)
        .arg("-o")
        .arg(options(source, allowed))
        .arg("--")
        .arg(path)
        .env(VARIABLE, "0")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .output()
        .map_err(|error| cannot(format!("{name}: {}", blockhaul_io::plain(&error))))?;
    if !ran.status.success() {
        return Err(cannot(said(&ran.stderr, name)));
    }
    let fd = received(&ours).map_err(system)?;
    let fd = fd.ok_or_else(|| cannot(format!("{name} has sent no descriptor")))?;
    rustix::io::ioctl_fionbio(&fd, true).map_err(system)?;
    Ok(fd)
}

/// The options for mounting.
fn options(source: &str, allowed: &Permissions) -> String {
    let mut options =
        format!("nosuid,nodev,subtype=blockhaul,default_permissions,max_read={READ_MAX}");
    options += if allowed.write { ",rw" } else { ",ro" };
    if allowed.others {
        options += ",allow_other";
    }
    let source = source.replace(['\0', '\n'], "").replace('\\', "\\\\").replace(',', "\\,");
    options + ",fsname=" + &source
}

/// What the program has written, in one line.
fn said(bytes: &[u8], name: &str) -> String {
    let text = String::from_utf8_lossy(bytes);
    match text.lines().find(|line| !line.trim().is_empty()) {
        Some(line) => line.trim().to_string(),
        None => format!("{name} has failed"),
    }
}

/// The descriptor that was sent.
fn received(socket: impl AsFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(descriptors.flatten().next())
}

/// Unmounts `path`, with `lazily` even if it is in use; false if it is.
pub(super) fn unmount(path: &Path, lazily: bool) -> Result<bool, MountError> {
    let name = needed()?;
    let mut command = Command::new(name);
    command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(path).stdin(Stdio::null());
    let cannot = |why: String| MountError(format!("cannot unmount {}: {why}", path.display()));
    let ran = command.output().map_err(|error| cannot(blockhaul_io::plain(&error)))?;
    if ran.status.success() || table::find(path).is_none() {
        Ok(true)
    } else if !lazily {
        Ok(false)
    } else {
        Err(cannot(said(&ran.stderr, name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_cannot_add_options() {
        let allowed = Permissions { uid: 0, gid: 0, write: false, others: false };
        let text = options("a,allow_other\\,b\n", &allowed);
        assert!(text.ends_with(",ro,fsname=a\\,allow_other\\\\\\,b"), "{text}");
    }
}
