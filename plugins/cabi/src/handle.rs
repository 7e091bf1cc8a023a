//! An open handle of a plugin: what it says about itself, and the calls that do its requests. All of
//! this runs on the threads of the handle's lane.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::{Arc, OnceLock};

use block::{
    BASE_ALLOCATION, BlockSizes, Can, Error, Extents, Facts, Flags, Kind, Op, Outcome, Reply,
    Request, Result,
};
use io::Data;

use crate::abi::{self, Ask};
use crate::context::{self, Context, Left};
use crate::lists;
use crate::plugin::Plugin;
use crate::sink::Sink;
use crate::visit::Connection;

/// Longest read or write that plugins get at once: nbdkit's bound, which plugins may rely on.
const TRANSFER_MAX: u32 = 64 << 20;
/// Longest range of other calls: lengths have 32 bits, and stay aligned to any block.
pub(crate) const RANGE_MAX: u64 = 0xffff_0000;

/// An open handle. Closed, on its lane, when dropped.
pub(crate) struct Handle {
    pub(crate) connection: Arc<Connection>,
    pub(crate) context: Arc<Context>,
    pub(crate) pointer: HandlePointer,
    pub(crate) facts: Arc<Facts>,
    /// Whether `zero` may be called at all.
    native_zero: bool,
    fua: c_int,
    cache: c_int,
    /// Longest read or write that the plugin gets at once.
    longest: u32,
    /// What an asynchronous plugin knows as `conn`.
    pub(crate) token: OnceLock<u64>,
}

/// What `open` answered: a token for the plugin.
#[derive(Clone, Copy)]
pub(crate) struct HandlePointer(pub(crate) abi::Handle);

// SAFETY: never looked behind here; the plugin gets it back by the rules of its thread model.
unsafe impl Send for HandlePointer {}
// SAFETY: as above.
unsafe impl Sync for HandlePointer {}

impl Handle {
    /// Opens a handle and asks it about itself, once.
    pub(crate) fn open(
        connection: Arc<Connection>,
        name: CString,
        tls: bool,
    ) -> Result<Arc<Handle>> {
        let plugin = &connection.plugin;
        let shown = match name.is_empty() {
            true => format!("nbdkit:{}", plugin.name),
            false => format!("nbdkit:{}/{}", plugin.name, name.to_string_lossy()),
        };
        let context = Arc::new(connection.context(Some(name), tls));
        let open = plugin.abi.open.expect("checked when it was loaded");
        let readonly = c_int::from(connection.readonly);
        // SAFETY: the callback takes a number, on the connection's lane.
        let (pointer, left) = context::call(&context, c"open", || unsafe { open(readonly) });
        if pointer.is_null() {
            return Err(match left.text.is_empty() {
                true => {
                    let text =
                        format!("plugin {}: open answered NULL and gave no reason", plugin.name);
                    Error::new(Kind::Io, text)
                }
                false => plugin.error("open", &left),
            });
        }
        let mut handle = Handle {
            context,
            pointer: HandlePointer(pointer),
            facts: Arc::new(Facts::new(shown, 0)),
            native_zero: false,
            fua: abi::FUA_NONE,
            cache: 0,
            longest: TRANSFER_MAX,
            token: OnceLock::new(),
            connection: connection.clone(),
        };
        // A failure from here on drops the handle, which closes it.
        handle.ask_all()?;
        Ok(Arc::new(handle))
    }

    /// Whether the plugin's own calls are durable when asked to be.
    pub(crate) fn has_native_fua(&self) -> bool {
        self.fua == abi::FUA_NATIVE
    }

    fn plugin(&self) -> &Plugin {
        &self.connection.plugin
    }

    /// Asks a question that answers -1, or a number from 0 on.
    fn ask(&self, name: &'static CStr, callback: Option<Ask>, otherwise: c_int) -> Result<c_int> {
        let Some(callback) = callback else { return Ok(otherwise) };
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane.
        let (answer, left) = context::call(&self.context, name, || unsafe { callback(pointer) });
        if answer < 0 {
            return Err(self.plugin().error(&name.to_string_lossy(), &left));
        }
        self.plugin().log_rest(&left, answer);
        Ok(answer)
    }

    fn ask_all(&mut self) -> Result<()> {
        let plugin = self.connection.plugin.clone();
        let (abi, v2) = (&plugin.abi, plugin.is_v2());
        let asynchronous = plugin.asynchronous.as_ref();
        let has = |v1: bool, now: bool| c_int::from(if v2 { now } else { v1 });
        let mut facts = Facts::clone(&self.facts);
        facts.size = self.ask_size()?;
        (facts.block, facts.told) = self.ask_block_size()?;
        self.longest = facts.block.maximum;
        // What is longer is taken apart here; partial blocks, whose memory is bounded by this, elsewhere.
        if facts.block.minimum == 1 && asynchronous.is_none() {
            facts.block.maximum = TRANSFER_MAX;
        }
        facts.description = self.ask_description();
        facts.rotational = self.ask(c"is_rotational", abi.is_rotational, 0)? != 0;
        let mut can = Can::empty();
        let writes = has(abi.pwrite_v1.is_some(), abi.pwrite.is_some())
            | c_int::from(asynchronous.is_some_and(|plugin| plugin.pwrite.is_some()));
        let write =
            !self.connection.readonly && self.ask(c"can_write", abi.can_write, writes)? != 0;
        can.set(Can::WRITE, write);
        let flushes = has(abi.flush_v1.is_some(), abi.flush.is_some())
            | c_int::from(asynchronous.is_some_and(|plugin| plugin.flush.is_some()));
        can.set(Can::FLUSH, self.ask(c"can_flush", abi.can_flush, flushes)? != 0);
        if write {
            let trims = has(abi.trim_v1.is_some(), abi.trim.is_some())
                | c_int::from(asynchronous.is_some_and(|plugin| plugin.trim.is_some()));
            can.set(Can::TRIM, self.ask(c"can_trim", abi.can_trim, trims)? != 0);
            let zeroes = has(abi.zero_v1.is_some(), abi.zero.is_some())
                | c_int::from(asynchronous.is_some_and(|plugin| plugin.zero.is_some()));
            let zero = self.ask(c"can_zero", abi.can_zero, zeroes)? != 0;
            self.native_zero = zero && zeroes != 0;
            // Without it zeroing is writing, and slow at once.
            let fast =
                self.ask(c"can_fast_zero", abi.can_fast_zero, c_int::from(!self.native_zero))?;
            can.set(Can::FAST_ZERO, fast != 0);
            // Where writing is asynchronous, so is what stands in for zeroing: elsewhere.
            // A filter may say that there is no zeroing at all.
            let never = plugin.filtered && !zero;
            if never {
                facts.withheld |= Can::ZERO | Can::FAST_ZERO;
            }
            can.set(Can::ZERO, !never && (self.native_zero || asynchronous.is_none()));
            let usual = match (flushes != 0, asynchronous.is_some()) {
                (false, _) => abi::FUA_NONE,
                (true, false) => abi::FUA_EMULATE,
                (true, true) => abi::FUA_NATIVE,
            };
            self.fua = self.ask(c"can_fua", abi.can_fua, usual)?;
            if !v2 {
                self.fua = self.fua.min(abi::FUA_EMULATE);
            }
            can.set(Can::FUA, (abi::FUA_EMULATE..=abi::FUA_NATIVE).contains(&self.fua));
            // Whoever says that there is none wants clients to flush by themselves.
            if self.fua == abi::FUA_NONE && abi.can_fua.is_some() {
                facts.withheld |= Can::FUA;
            }
        }
        let caches =
            abi.cache.is_some() || asynchronous.is_some_and(|plugin| plugin.cache.is_some());
        self.cache =
            self.ask(c"can_cache", abi.can_cache, c_int::from(caches) * abi::CACHE_NATIVE)?;
        can.set(Can::CACHE, (abi::CACHE_EMULATE..=abi::CACHE_NATIVE).contains(&self.cache));
        let extents =
            abi.extents.is_some() || asynchronous.is_some_and(|plugin| plugin.extents.is_some());
        let asked = self.ask(c"can_extents", abi.can_extents, c_int::from(extents))?;
        if asked != 0 && extents {
            can |= Can::EXTENTS;
            facts.contexts = vec![BASE_ALLOCATION.to_string()];
        }
        let multi = self.ask(c"can_multi_conn", abi.can_multi_conn, 0)? != 0;
        let several = plugin.model != abi::ThreadModel::SerializeConnections;
        can.set(Can::MULTI_CONN, multi && several);
        facts.can = can;
        facts.in_flight = Some(plugin.budget.limit()).filter(|&bytes| bytes > 0);
        // Unknown; 1 claims nothing.
        facts.allocation_unit = facts.block.minimum.max(1);
        self.facts = Arc::new(facts);
        Ok(())
    }

    fn ask_size(&self) -> Result<u64> {
        let get_size = self.plugin().abi.get_size.expect("checked when it was loaded");
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane.
        let (size, left) =
            context::call(&self.context, c"get_size", || unsafe { get_size(pointer) });
        match u64::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) if size == -1 => Err(self.plugin().error("get_size", &left)),
            Err(_) => {
                let text = format!("plugin {}: get_size answered {size}", self.plugin().name);
                Err(Error::new(Kind::Io, text))
            }
        }
    }

    /// Limits that are kept to here, and what the plugin wants clients to hear. For a server's clients
    /// that is all there is to it, as in nbdkit: what they send comes to the plugin as it is, whether it
    /// keeps to these sizes or not. This program's own requests keep to them, and so do all that an
    /// asynchronous plugin gets, whose buffers they bound.
    fn ask_block_size(&self) -> Result<(BlockSizes, Option<BlockSizes>)> {
        let usual = BlockSizes { maximum: TRANSFER_MAX, ..BlockSizes::default() };
        let Some(block_size) = self.plugin().abi.block_size else { return Ok((usual, None)) };
        let (mut minimum, mut preferred, mut maximum) = (0, 0, 0);
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane, and three places to write to.
        let (result, left) = context::call(&self.context, c"block_size", || unsafe {
            block_size(pointer, &raw mut minimum, &raw mut preferred, &raw mut maximum)
        });
        if result == -1 {
            return Err(self.plugin().error("block_size", &left));
        }
        if (minimum, preferred, maximum) == (0, 0, 0) {
            return Ok((usual, None));
        }
        let fine = (1..=65536).contains(&minimum)
            && minimum.is_power_of_two()
            && (512..=32 << 20).contains(&preferred)
            && preferred.is_power_of_two()
            && minimum <= preferred
            && (maximum == u32::MAX || maximum.is_multiple_of(minimum) && maximum >= preferred);
        if !fine {
            let text = format!(
                "plugin {}: block_size answered {minimum}, {preferred} and {maximum}, which are no \
                 minimum, preferred size and maximum",
                self.plugin().name
            );
            return Err(Error::new(Kind::Io, text));
        }
        let told = BlockSizes { minimum, preferred, maximum };
        let asynchronous = self.plugin().asynchronous.is_some();
        // What becomes of requests that do not keep to them is the filters' business, too.
        let free = self.plugin().filtered || self.connection.served && !asynchronous;
        let kept = match free {
            true => BlockSizes { preferred, ..usual },
            false => BlockSizes { maximum: maximum.min(TRANSFER_MAX).max(preferred), ..told },
        };
        Ok((kept, Some(told)))
    }

    fn ask_description(&self) -> String {
        let Some(export_description) = self.plugin().abi.export_description else {
            return String::new();
        };
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane.
        let (text, _) = context::call(&self.context, c"export_description", || unsafe {
            export_description(pointer)
        });
        // SAFETY: null or a C string, copied at once.
        unsafe { crate::api::text(text) }.map(std::borrow::Cow::into_owned).unwrap_or_default()
    }

    /// Does a request, and blocks until it is done.
    pub(crate) fn perform(&self, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                let out = buf.as_mut_ptr();
                for (piece, count) in pieces(at, buf.len() as u64, self.longest.into()) {
                    // Inside of the buffer, which is as long as the pieces together.
                    let out = out.wrapping_add((piece - at) as usize);
                    self.read(piece, out.cast(), count)?;
                }
                Ok(Reply::Data(buf.into()))
            }
            Op::Write(data) => self.durably(flags, |fua| {
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

    /// Runs what changes the device, with the plugin's own FUA or a flush behind it.
    fn durably(&self, flags: Flags, change: impl FnOnce(u32) -> Result<()>) -> Outcome {
        let fua = flags.contains(Flags::FUA);
        let native = fua && self.fua == abi::FUA_NATIVE;
        change(if native { abi::FLAG_FUA } else { 0 })?;
        if fua && !native {
            self.flush()?;
        }
        Ok(Reply::Done)
    }

    /// The plugin's answer to a call: 0, or -1 with an error. Anything else is named.
    fn settle(&self, name: &CStr, result: c_int, left: &Left) -> Result<()> {
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
                Err(Error::new(Kind::Io, text))
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

    /// Has the plugin write `count` bytes to `out`, which must have room for them.
    fn read(&self, at: u64, out: *mut c_void, count: u32) -> Result<()> {
        let abi = &self.plugin().abi;
        let pointer = self.pointer.0;
        // SAFETY: an open handle, on its lane; `out` has room for `count` bytes.
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
        let (pointer, from) = (self.pointer.0, bytes.as_ptr().cast::<c_void>());
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
        let (abi, pointer) = (&self.plugin().abi, self.pointer.0);
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
        let (abi, pointer) = (&self.plugin().abi, self.pointer.0);
        for (at, count) in pieces(at, len, RANGE_MAX) {
            // SAFETY: an open handle, on its lane.
            self.call(c"trim", || unsafe {
                match (abi.trim, abi.trim_v1) {
                    (Some(trim), _) if abi.api_version >= 2 => trim(pointer, count, at, flags),
                    (_, Some(trim)) => trim(pointer, count, at),
                    // The plugin said that it can trim: then there is nothing to do.
                    _ => 0,
                }
            })?;
        }
        Ok(())
    }

    fn zero(&self, at: u64, len: u64, flags: Flags, fua: u32) -> Result<()> {
        for (at, count) in pieces(at, len, RANGE_MAX) {
            self.zero_piece(at, count, flags, fua)?;
        }
        Ok(())
    }

    /// The plugin's zero, or where that is not supported, writes.
    fn zero_piece(&self, at: u64, count: u32, flags: Flags, fua: u32) -> Result<()> {
        let fast = flags.contains(Flags::FAST);
        let may_trim = !flags.contains(Flags::NO_HOLE);
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
        let (abi, pointer) = (&self.plugin().abi, self.pointer.0);
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
            let sink = usize::try_from(most).map_err(std::io::Error::other).and_then(Sink::new);
            let sink = sink.map_err(|error| Error::system("no memory to read into", error))?;
            for (at, count) in pieces(at, len, most) {
                self.read(at, sink.pointer(), count)?;
            }
            return Ok(());
        }
        let (Some(cache), pointer) = (self.plugin().abi.cache, self.pointer.0) else {
            // It said that it caches, and has nothing to do for it.
            return Ok(());
        };
        for (at, count) in pieces(at, len, RANGE_MAX) {
            // SAFETY: an open handle, on its lane.
            self.call(c"cache", || unsafe { cache(pointer, count, at, 0) })?;
        }
        Ok(())
    }

    fn extents(&self, at: u64, len: u64, flags: Flags) -> Result<Extents> {
        let pointer = self.pointer.0;
        let Some(extents) = self.plugin().abi.extents else {
            return Ok(Extents::one(len, 0));
        };
        let count = u32::try_from(len.min(RANGE_MAX)).expect("bounded just here");
        let one = flags.contains(Flags::ONE_EXTENT);
        let mut list = lists::Extents::new(at, self.facts.size);
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
        list: &lists::Extents,
        len: u64,
        one: bool,
    ) -> Result<Extents> {
        let mut extents = Extents::new();
        for extent in list.list() {
            extents.push(extent.len, u64::from(extent.state & 3));
        }
        if extents.is_empty() {
            let text = format!("plugin {}: extents answered none", self.plugin().name);
            return Err(Error::new(Kind::Io, text));
        }
        extents.cut_at(len);
        if one {
            extents.first_only();
        }
        Ok(extents)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(&token) = self.token.get() {
            crate::asynchronous::forget(token);
        }
        let Some(close) = self.connection.plugin.abi.close else { return };
        let (pointer, context) = (self.pointer, self.context.clone());
        let connection = self.connection.clone();
        self.connection.lane.run(move || {
            let pointer = pointer;
            // SAFETY: the last use of an open handle, on its lane: every request held the handle.
            let ((), left) = context::call(&context, c"close", || unsafe { close(pointer.0) });
            connection.plugin.log_rest(&left, 0);
            drop((context, connection));
        });
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
