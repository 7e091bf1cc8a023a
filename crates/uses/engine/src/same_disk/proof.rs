//! A block that identifies a disk: a connection that reads it at the same place sees the same disk.

use blockhaul_io::is_zero;
use std::sync::Arc;

use blockhaul_block::{Device, DeviceExt, Result};

/// A block that is known to be the same on source and target of the first lane.
#[derive(Debug, Clone)]
pub(crate) struct Proof {
    at: u64,
    bytes: Arc<[u8]>,
}

impl Proof {
    /// Its length: one block of every common file system.
    pub(crate) const LEN: usize = 4096;

    /// The first whole block of `bytes` with content, if there is one.
    pub(crate) fn of(at: u64, bytes: &[u8]) -> Option<Proof> {
        let found = bytes.chunks_exact(Proof::LEN).position(|block| !is_zero(block))?;
        let start = found * Proof::LEN;
        Some(Proof { at: at + start as u64, bytes: bytes[start..start + Proof::LEN].into() })
    }

    /// Its offset.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Whether a device has the same block there.
    pub(crate) async fn is_on(&self, device: &dyn Device) -> Result<bool> {
        let data = device.read(self.at, self.bytes.len()).await?;
        Ok(data.bytes() == &*self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_the_first_block_with_content() {
        let mut bytes = vec![0; 3 * Proof::LEN + 100];
        assert!(Proof::of(0, &bytes).is_none());
        bytes[3 * Proof::LEN + 1] = 1;
        assert!(Proof::of(0, &bytes).is_none(), "a partial block is none");
        bytes[Proof::LEN + 7] = 1;
        let proof = Proof::of(1 << 20, &bytes).unwrap();
        assert_eq!(proof.at, (1 << 20) + Proof::LEN as u64);
        assert_eq!(proof.bytes[7], 1);
    }
}
