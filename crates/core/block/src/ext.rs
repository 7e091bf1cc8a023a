//! Convenience methods for callers: one per command, over [`Device::submit`].

use blockhaul_io::{Data, Reservation};

use crate::{ContextSet, Device, Error, Extents, Reply, Request, Result};

/// Commands as methods, for callers that await one request at a time.
pub trait DeviceExt: Device {
    /// Reads `len` bytes into memory outside any pool. A hole yields zeroes.
    fn read(&self, at: u64, len: usize) -> impl Future<Output = Result<Data>> {
        let pending = self.submit(Request::read(at, Reservation::unpooled(len)));
        async move {
            match pending.await? {
                Reply::Data(data) => Ok(data),
                Reply::Hole => Ok(Data::from(blockhaul_io::Buf::unpooled(len))),
                _ => Err(Error::misfit()),
            }
        }
    }

    /// Writes `data`.
    fn write(&self, at: u64, data: Data) -> impl Future<Output = Result<()>> {
        done(self.submit(Request::write(at, data)))
    }

    /// Zeroes a range.
    fn zero(&self, at: u64, len: u64) -> impl Future<Output = Result<()>> {
        done(self.submit(Request::zero(at, len)))
    }

    /// Trims a range.
    fn trim(&self, at: u64, len: u64) -> impl Future<Output = Result<()>> {
        done(self.submit(Request::trim(at, len)))
    }

    /// Flushes.
    fn flush(&self) -> impl Future<Output = Result<()>> {
        done(self.submit(Request::flush()))
    }

    /// Extents in the contexts given; at least the first byte of the range is covered.
    fn extents(
        &self,
        at: u64,
        len: u64,
        contexts: ContextSet,
    ) -> impl Future<Output = Result<Vec<Extents>>> {
        let pending = self.submit(Request::extents(at, len, contexts));
        async move {
            match pending.await? {
                Reply::Extents(lists) if lists.len() == contexts.count() => Ok(lists),
                _ => Err(Error::misfit()),
            }
        }
    }
}

impl<D: Device + ?Sized> DeviceExt for D {}

async fn done(pending: crate::PendingRequest) -> Result<()> {
    match pending.await? {
        Reply::Done => Ok(()),
        _ => Err(Error::misfit()),
    }
}
