//! Socket addresses of virtual machines and their host (vsock(7)).
#![expect(unsafe_code, reason = "an address family that the safe crates do not know")]

use std::mem::size_of;

use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use rustix::net::{AddressFamily, SocketAddrAny};

/// The address of a machine and a port on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Address {
    /// The machine's context ID.
    pub(crate) cid: u32,
    pub(crate) port: u32,
}

/// Any machine that can reach this one.
pub(crate) const ANY: u32 = libc::VMADDR_CID_ANY;

// SAFETY: the closure gets a pointer to a whole `sockaddr_vm`, which lives until it returns, and its
// size.
unsafe impl SocketAddrArg for Address {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        // SAFETY: all zeroes is a valid value of this plain structure of numbers.
        let mut address: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        #[expect(clippy::cast_possible_truncation, reason = "families are small numbers")]
        let family = libc::AF_VSOCK as libc::sa_family_t;
        address.svm_family = family;
        address.svm_cid = self.cid;
        address.svm_port = self.port;
        #[expect(clippy::cast_possible_truncation, reason = "the structure has 16 bytes")]
        let len = size_of::<libc::sockaddr_vm>() as SocketAddrLen;
        f((&raw const address).cast(), len)
    }
}

impl Address {
    /// The address, if it is one of this family.
    pub(crate) fn of(any: &SocketAddrAny) -> Option<Address> {
        if any.address_family() != AddressFamily::VSOCK {
            return None;
        }
        let read = |pointer: *const SocketAddrOpaque, len: SocketAddrLen| {
            if (len as usize) < size_of::<libc::sockaddr_vm>() {
                return None;
            }
            // SAFETY: there are as many bytes as the structure has, all of them initialized, and
            // any bytes are valid numbers; the pointer need not be aligned.
            let address = unsafe { pointer.cast::<libc::sockaddr_vm>().read_unaligned() };
            Some(Address { cid: address.svm_cid, port: address.svm_port })
        };
        // SAFETY: the pointer is only read, for the given number of bytes.
        unsafe { any.with_sockaddr(read) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_comes_back_as_it_was() {
        let address = Address { cid: 2, port: 0x1234_5678 };
        assert_eq!(Address::of(&address.as_any()), Some(address));
        let other = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(Address::of(&other.as_any()), None);
    }
}
