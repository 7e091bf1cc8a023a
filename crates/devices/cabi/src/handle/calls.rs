//! The calls for requests to an open handle.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use blockhaul_block::{
    Error, Extents, Kind, Op, Outcome, PendingRequest, Reply, Request, RequestFlags, Result,
};
use blockhaul_io::Data;

use super::PluginHandle;
use crate::abi;
use crate::context::{self, CallResults};
use crate::lists;
use crate::overdue::CallTimeout;
use crate::sink::DiscardMemory;

/// Maximum length of other calls: lengths have 32 bits, and stay aligned to any block.
pub(crate) const RANGE_MAX: u64 = 0xffff_0000;

impl PluginHandle {
    /// Submits a request to the plugin's blocking callbacks.
    pub(crate) fn submit(self: &Arc<PluginHandle>, request: Request) -> PendingRequest {
        let kind = request.kind();
        let at = request.at;
        let len = request.len;
        let (completer, pending) = PendingRequest::completer();
        let plugin = self.connection.plugin.clone();
        let lane = self.connection.lane.clone();
        let own = self.clone();
        let overdue = CallTimeout::of(&plugin);
        let timing = overdue.clone();
        lane.run(move || {
            let outcome = CallTimeout::during(timing.as_ref(), || own.perform(request));
            // Before the reply: its receiver may check whether the handle is still open.
            drop(own);
            completer.complete(outcome);
        });
        let Some(overdue) = overdue else { return pending };
        PendingRequest::start(async move {
            match overdue.wait(pending).await {
                Ok(outcome) => outcome,
                Err(stage) => Err(plugin.no_answer(kind, at, len, stage, overdue.limit)),
            }
        })
    }

    /// Carries out a request, and blocks until it is done.
    pub(crate) fn perform(&self, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                let out = buf.as_mut_ptr();
                for (piece, count) in pieces(at, buf.len() as u64, self.longest.into()) {
                    // Inside the buffer, which is as long as all pieces together.
                    let out = out.wrapping_add((piece - at) as usize);
                    self.read(piece, out.cast(), count)?;
                }
                Ok(Reply::Data(buf.into()))
            }
            Op::Write(data) => self.durably(flags, |fua| {
                let data = aligned(data);
                let pieces = data.bytes().chunks(self.longest as usize);
                let places = (at..).step_by(self.longest as usize);
                pieces.zip(places).try_for_each(|(piece, at)| self.write(at, piece, fua))
            }),
            Op::Zero => self.durably(flags, |fua| self.zero(at, len, flags, fua)),
            Op::Trim => self.durably(flags, |fua| self.trim(at, len, fua)),
            Op::Flush => self.flush().map(|()| Reply::Done),
            Op::Cache => self.cache(at, len).map(|()| Reply::Done),
            Op::Extents(_) => self.extents(at, len, flags).map(|list| Reply::Extents(vec![list])),
        }
    }

    /// Runs a change with the plugin's own FUA, or followed by a flush.
    fn durably(&self, flags: RequestFlags, change: impl FnOnce(u32) -> Result<()>) -> Outcome {
        let fua = flags.contains(RequestFlags::FUA);
        let native = fua && self.fua == abi::FUA_NATIVE;
        change(if native { abi::FLAG_FUA } else { 0 })?;
        if fua && !native {
            self.flush()?;
        }
        Ok(Reply::Done)
    }

    /// Checks the result of a call: 0, or -1 with an error. Other values are reported.
    fn settle(&self, name: &CStr, result: c_int, left: &CallResults) -> Result<()> {
        match result {
            0 => {
                self.plugin().log_rest(left, 0);
                Ok(())
            }
            -1 => Err(self.plugin().error(&name.to_string_lossy(), left)),
            other => {
                let name = name.to_string_lossy();
                let text = format!(
                    "plugin {}: {name} answered {other} instead of 0 or -1",
                    self.plugin().name
                );
                Err(Error::new(Kind::Io, text).complete())
            }
        }
    }

    fn call(&self, name: &'static CStr, call: impl FnOnce() -> c_int) -> Result<()> {
        let (result, left) = context::call(&self.context, name, call);
        self.settle(name, result, &left)
    }

    fn missing(&self, callback: &str) -> Error {
        let text = format!("plugin {} has no {callback} callback", self.plugin().name);
        Error::new(Kind::Invalid, text)
    }

    /// Reads `count` bytes to `out`, which must have space for them.
    fn read(&self, at: u64, out: *mut c_void, count: u32) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane; `out` has space for `count` bytes.
        self.call(c"pread", || unsafe {
            match (abi.pread, abi.pread_v1) {
                (Some(pread), _) if abi.api_version >= 2 => pread(pointer, out, count, at, 0),
                (_, Some(pread)) => pread(pointer, out, count, at),
                _ => -1,
            }
        })
    }

    fn write(&self, at: u64, bytes: &[u8], flags: u32) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        let from = bytes.as_ptr().cast::<c_void>();
        let count = u32::try_from(bytes.len()).expect("the fence keeps to the maximum");
        if !self.plugin().is_v2() {
            let Some(pwrite) = abi.pwrite_v1 else { return Err(self.missing("pwrite")) };
            // SAFETY: an open handle, on its lane; `from` points to `count` bytes.
            return self.call(c"pwrite", || unsafe { pwrite(pointer, from, count, at) });
        }
        let Some(pwrite) = abi.pwrite else { return Err(self.missing("pwrite")) };
        // SAFETY: as above.
        self.call(c"pwrite", || unsafe { pwrite(pointer, from, count, at, flags) })
    }

    pub(crate) fn flush(&self) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        if !self.plugin().is_v2() {
            let Some(flush) = abi.flush_v1 else { return Err(self.missing("flush")) };
            // SAFETY: an open handle, on its lane.
            return self.call(c"flush", || unsafe { flush(pointer) });
        }
        let Some(flush) = abi.flush else { return Err(self.missing("flush")) };
        // SAFETY: as above.
        self.call(c"flush", || unsafe { flush(pointer, 0) })
    }

    fn trim(&self, at: u64, len: u64, flags: u32) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        for (at, count) in pieces(at, len, RANGE_MAX) {
            // SAFETY: an open handle, on its lane.
            self.call(c"trim", || unsafe {
                match (abi.trim, abi.trim_v1) {
                    (Some(trim), _) if abi.api_version >= 2 => trim(pointer, count, at, flags),
                    (_, Some(trim)) => trim(pointer, count, at),
                    // The plugin claims that it can trim: then there is nothing to do.
                    _ => 0,
                }
            })?;
        }
        Ok(())
    }

    fn zero(&self, at: u64, len: u64, flags: RequestFlags, fua: u32) -> Result<()> {
        for (at, count) in pieces(at, len, RANGE_MAX) {
            self.zero_piece(at, count, flags, fua)?;
        }
        Ok(())
    }

    /// The plugin's zero, or writes if that is not supported.
    fn zero_piece(&self, at: u64, count: u32, flags: RequestFlags, fua: u32) -> Result<()> {
        let fast = flags.contains(RequestFlags::FAST);
        let may_trim = !flags.contains(RequestFlags::NO_HOLE);
        if self.native_zero {
            match self.call_zero(at, count, may_trim, fast, fua) {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == Kind::Unsupported && !fast => {}
                Err(error) => return Err(error),
            }
        }
        if fast {
            return Err(Error::new(Kind::Unsupported, "zeroing is no faster than writing here"));
        }
        let most = u64::from(self.longest).min(Data::ZEROES_MAX as u64);
        let most = most - most % u64::from(self.facts.block.minimum.max(1));
        for (at, piece) in pieces(at, count.into(), most.max(1)) {
            self.write(at, Data::zeroes(piece as usize).bytes(), fua)?;
        }
        Ok(())
    }

    fn call_zero(&self, at: u64, count: u32, may_trim: bool, fast: bool, fua: u32) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        if !self.plugin().is_v2() {
            let Some(zero) = abi.zero_v1.filter(|_| !fast) else {
                return Err(Error::new(
                    Kind::Unsupported,
                    "zeroing may be as slow as writing here",
                ));
            };
            // SAFETY: an open handle, on its lane.
            return self
                .call(c"zero", || unsafe { zero(pointer, count, at, c_int::from(may_trim)) });
        }
        let mut flags = fua;
        if may_trim {
            flags |= abi::FLAG_MAY_TRIM;
        }
        if fast {
            flags |= abi::FLAG_FAST_ZERO;
        }
        let Some(zero) = abi.zero else { return Err(self.missing("zero")) };
        // SAFETY: as above.
        self.call(c"zero", || unsafe { zero(pointer, count, at, flags) })
    }

    fn cache(&self, at: u64, len: u64) -> Result<()> {
        if self.cache == abi::CACHE_EMULATE {
            // In pieces as long as clients' own reads may be.
            let most = u64::from(self.longest).min(len);
            let sink =
                usize::try_from(most).map_err(std::io::Error::other).and_then(DiscardMemory::new);
            let sink = sink.map_err(|error| Error::system("no memory to read into", error))?;
            for (at, count) in pieces(at, len, most) {
                self.read(at, sink.pointer(), count)?;
            }
            return Ok(());
        }
        let (Some(cache), pointer) = (self.plugin().abi.cache, self.pointer.0) else {
            // It claims to cache, and has nothing to do for it.
            return Ok(());
        };
        for (at, count) in pieces(at, len, RANGE_MAX) {
            // SAFETY: an open handle, on its lane.
            self.call(c"cache", || unsafe { cache(pointer, count, at, 0) })?;
        }
        Ok(())
    }

    fn extents(&self, at: u64, len: u64, flags: RequestFlags) -> Result<Extents> {
        let pointer = self.pointer.0;
        let Some(extents) = self.plugin().abi.extents else {
            return Ok(Extents::one(len, 0));
        };
        let count = u32::try_from(len.min(RANGE_MAX)).expect("bounded just here");
        let one = flags.contains(RequestFlags::ONE_EXTENT);
        let mut list = lists::ExtentList::new(at, self.facts.size);
        let out = (&raw mut list).cast();
        // SAFETY: an open handle, on its lane; the list lives through the call.
        self.call(c"extents", || unsafe {
            extents(pointer, count, at, if one { abi::FLAG_REQ_ONE } else { 0 }, out)
        })?;
        self.extents_from(&list, len, one)
    }

    /// A plugin's list as a reply.
    pub(crate) fn extents_from(
        &self,
        list: &lists::ExtentList,
        len: u64,
        one: bool,
    ) -> Result<Extents> {
        let mut extents = Extents::new();
        for extent in list.list() {
            extents.push(extent.len, u64::from(extent.state & 3));
        }
        if extents.is_empty() {
            let text = format!("plugin {}: extents answered none", self.plugin().name);
            return Err(Error::new(Kind::Io, text).complete());
        }
        extents.cut_at(len);
        if one {
            extents.first_only();
        }
        Ok(extents)
    }
}

/// A page-aligned payload, as plugins need for direct I/O: payloads received together with other
/// requests, and slices made by layers, are copied.
pub(crate) fn aligned(data: Data) -> Data {
    if data.bytes().as_ptr().align_offset(blockhaul_io::ALIGN) == 0 {
        data
    } else {
        Data::copy_of(data.bytes())
    }
}

/// A range in pieces of at most `most` bytes, which fits 32 bits.
fn pieces(at: u64, len: u64, most: u64) -> impl Iterator<Item = (u64, u32)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let count = (len - done).min(most);
        let piece = (at + done, u32::try_from(count).unwrap_or(u32::MAX));
        done += count;
        (count > 0).then_some(piece)
    })
}
