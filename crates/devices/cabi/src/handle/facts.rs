//! The facts of an open handle, queried once.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use blockhaul_block::{BASE_ALLOCATION, BlockSizes, Can, Error, Facts, Kind, Result, ThreadModel};

use super::{PluginHandle, TRANSFER_MAX};
use crate::abi::{self, Ask};
use crate::context;

impl PluginHandle {
    /// A query that returns -1, or a number from 0 on.
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

    /// Makes all queries.
    pub(super) fn ask_all(&mut self) -> Result<()> {
        let plugin = self.connection.plugin.clone();
        let abi = &plugin.abi;
        let v2 = plugin.is_v2();
        let asynchronous = plugin.asynchronous.as_ref();
        let has = |v1: bool, now: bool| c_int::from(if v2 { now } else { v1 });
        let mut facts = Facts::clone(&self.facts);
        facts.size = self.ask_size()?;
        (facts.block, facts.advertised) = self.ask_block_size(facts.size)?;
        self.longest = facts.block.maximum;
        // Longer requests are split here; the emulation of partial blocks, whose memory this
        // limits, is elsewhere.
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
            can |= self.ask_changes(&mut facts, flushes != 0)?;
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
        let several = plugin.model != ThreadModel::SerializeConnections;
        can.set(Can::MULTI_CONN, multi && several);
        facts.can = can;
        facts.in_flight = Some(plugin.budget.limit()).filter(|&bytes| bytes > 0);
        // Unknown; 1 claims nothing.
        facts.allocation_unit = facts.block.minimum.max(1);
        self.facts = Arc::new(facts);
        Ok(())
    }

    /// Makes the queries about trim, zero and FUA of a device that can be written. `flushes`: the plugin has
    /// a callback for flushes.
    fn ask_changes(&mut self, facts: &mut Facts, flushes: bool) -> Result<Can> {
        let plugin = self.connection.plugin.clone();
        let abi = &plugin.abi;
        let v2 = plugin.is_v2();
        let asynchronous = plugin.asynchronous.as_ref();
        let has = |v1: bool, now: bool| c_int::from(if v2 { now } else { v1 });
        let mut can = Can::empty();
        let trims = has(abi.trim_v1.is_some(), abi.trim.is_some())
            | c_int::from(asynchronous.is_some_and(|plugin| plugin.trim.is_some()));
        can.set(Can::TRIM, self.ask(c"can_trim", abi.can_trim, trims)? != 0);
        let zeroes = has(abi.zero_v1.is_some(), abi.zero.is_some())
            | c_int::from(asynchronous.is_some_and(|plugin| plugin.zero.is_some()));
        let zero = self.ask(c"can_zero", abi.can_zero, zeroes)? != 0;
        self.native_zero = zero && zeroes != 0;
        // Without it zeroes are written, so fast zero fails at once.
        let fast = self.ask(c"can_fast_zero", abi.can_fast_zero, c_int::from(!self.native_zero))?;
        can.set(Can::FAST_ZERO, fast != 0);
        // If writes are asynchronous, zero is emulated elsewhere.
        // A filter may report that zero is not available at all.
        let never = plugin.filtered && !zero;
        if never {
            facts.withheld |= Can::ZERO | Can::FAST_ZERO;
        }
        can.set(Can::ZERO, !never && (self.native_zero || asynchronous.is_none()));
        let usual = match (flushes, asynchronous.is_some()) {
            (false, _) => abi::FUA_NONE,
            (true, false) => abi::FUA_EMULATE,
            (true, true) => abi::FUA_NATIVE,
        };
        self.fua = self.ask(c"can_fua", abi.can_fua, usual)?;
        if !v2 {
            self.fua = self.fua.min(abi::FUA_EMULATE);
        }
        can.set(Can::FUA, (abi::FUA_EMULATE..=abi::FUA_NATIVE).contains(&self.fua));
        // A plugin that reports none wants clients to flush themselves.
        if self.fua == abi::FUA_NONE && abi.can_fua.is_some() {
            facts.withheld |= Can::FUA;
        }
        Ok(can)
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
                Err(Error::new(Kind::Io, text).complete())
            }
        }
    }

    /// The limits enforced here, and those that the plugin wants to advertise. For a server's
    /// clients, as in nbdkit, they are only advertised: requests reach the plugin unchanged,
    /// whether they comply or not, unless the size is no multiple of the minimum: then a smaller one
    /// is advertised. This program's own requests comply, and so do all requests to an asynchronous
    /// plugin, whose buffers they limit.
    fn ask_block_size(&self, size: u64) -> Result<(BlockSizes, Option<BlockSizes>)> {
        let usual = BlockSizes { maximum: TRANSFER_MAX, ..BlockSizes::default() };
        let Some(block_size) = self.plugin().abi.block_size else { return Ok((usual, None)) };
        let mut minimum = 0;
        let mut preferred = 0;
        let mut maximum = 0;
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
        let Some(told) = BlockSizes::declared(minimum, preferred, maximum) else {
            let text = format!(
                "plugin {}: block_size answered {minimum}, {preferred} and {maximum}, which are no \
                 minimum, preferred size and maximum",
                self.plugin().name
            );
            return Err(Error::new(Kind::Io, text).complete());
        };
        let asynchronous = self.plugin().asynchronous.is_some();
        // Filters also handle requests that do not comply.
        let free = self.plugin().filtered || self.connection.served && !asynchronous;
        let free = free && told.dividing(size) == told;
        let kept = if free {
            BlockSizes { preferred, ..usual }
        } else {
            BlockSizes { maximum: maximum.min(TRANSFER_MAX).max(preferred), ..told }
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
}
