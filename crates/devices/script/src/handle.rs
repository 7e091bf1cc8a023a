//! An open handle of a script as a device: its facts, and the runs for its requests. Runs are jobs
//! on the connection's lane.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, Can, Device, Error, Extents, Facts, Kind, Op, Outcome,
    PendingRequest, Reply, Request, RequestFlags, Result, ThreadModel,
};
use blockhaul_io::{Buf, Data};

use crate::answer::MethodResult;
use crate::connection::{ScriptConnection, word};
use crate::parse;

/// Maximum length of other calls: nbdkit's lengths have 32 bits; aligned to any block.
const RANGE_MAX: u64 = 0xffff_0000;
/// Bytes read at a time to warm a cache.
const WARM: u64 = 1 << 20;

/// How an ability is implemented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScriptAbility {
    None,
    Emulate,
    Native,
}

/// An open handle. Closed, on its lane, when dropped.
pub(crate) struct ScriptHandle {
    connection: Arc<ScriptConnection>,
    /// The output of `open`.
    token: OsString,
    facts: Arc<Facts>,
    /// Whether `zero` is called at all.
    native_zero: bool,
    fua: ScriptAbility,
    cache: ScriptAbility,
}

/// A handle as a device.
pub(crate) struct ScriptDevice(pub(crate) Arc<ScriptHandle>);

impl Device for ScriptDevice {
    fn facts(&self) -> Arc<Facts> {
        self.0.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let (completer, pending) = PendingRequest::completer();
        let handle = self.0.clone();
        self.0.connection.lane.run(move || {
            let outcome = handle.perform(request);
            // Before the reply: its receiver may check whether the handle is still open.
            drop(handle);
            completer.complete(outcome);
        });
        pending
    }
}

impl ScriptHandle {
    /// Opens a handle and queries its facts once.
    pub(crate) fn open(
        connection: Arc<ScriptConnection>,
        name: &str,
        tls: bool,
    ) -> Result<Arc<ScriptHandle>> {
        let plugin = &connection.plugin;
        let shown =
            if name.is_empty() { plugin.shown() } else { format!("{}/{name}", plugin.shown()) };
        let args = [word(connection.readonly), name.into(), word(tls)];
        let token = match plugin.words("open", &args, Some(&connection.client))? {
            (MethodResult::Done, printed) => {
                OsStr::from_bytes(parse::line(&printed)).to_os_string()
            }
            _ => OsString::new(),
        };
        let mut handle = ScriptHandle {
            connection,
            token,
            facts: Arc::new(Facts::new(shown, 0)),
            native_zero: false,
            fua: ScriptAbility::None,
            cache: ScriptAbility::None,
        };
        // A failure from here on drops the handle, which closes it.
        handle.ask_all()?;
        Ok(Arc::new(handle))
    }

    /// In nbdkit's order.
    fn ask_all(&mut self) -> Result<()> {
        let mut facts = Facts::clone(&self.facts);
        facts.size = self.ask_size()?;
        let mut can = Can::empty();
        let write = !self.connection.readonly && self.ask("can_write")?.unwrap_or(false);
        can.set(Can::WRITE, write);
        let mut fua = None;
        if write {
            self.native_zero = self.ask("can_zero")?.unwrap_or(false);
            // Without it zeroes are written, so fast zero fails at once.
            let fast = self.ask("can_fast_zero")?.unwrap_or(!self.native_zero);
            // Zeroes are also written if a script reports only when called that it cannot zero.
            can |= Can::ZERO;
            can.set(Can::FAST_ZERO, fast);
            can.set(Can::TRIM, self.ask("can_trim")?.unwrap_or(false));
            fua = self.ask_level("can_fua")?;
        }
        let flush = self.ask("can_flush")?.unwrap_or(false);
        can.set(Can::FLUSH, flush);
        if write {
            self.fua =
                fua.unwrap_or(if flush { ScriptAbility::Emulate } else { ScriptAbility::None });
            can.set(Can::FUA, self.fua != ScriptAbility::None);
        }
        facts.rotational = self.ask("is_rotational")?.unwrap_or(false);
        let multi = self.ask("can_multi_conn")?.unwrap_or(false);
        let one = self.connection.plugin.model == ThreadModel::SerializeConnections;
        can.set(Can::MULTI_CONN, multi && !one);
        self.cache = self.ask_level("can_cache")?.unwrap_or(ScriptAbility::None);
        can.set(Can::CACHE, self.cache != ScriptAbility::None);
        if self.ask("can_extents")?.unwrap_or(false) {
            can |= Can::EXTENTS;
            facts.contexts = vec![BASE_ALLOCATION.to_string()];
        }
        facts.can = can;
        (facts.block, facts.advertised) = self.ask_block_size(facts.size)?;
        facts.description = self.ask_description();
        // Unknown; 1 claims nothing.
        facts.allocation_unit = facts.block.minimum.max(1);
        self.facts = Arc::new(facts);
        Ok(())
    }

    fn token(&self) -> [OsString; 1] {
        [self.token.clone()]
    }

    fn ask(&self, method: &'static str) -> Result<Option<bool>> {
        let ScriptConnection { plugin, client, .. } = &*self.connection;
        plugin.ask(method, &self.token(), Some(client))
    }

    /// The output of a method about the handle; `None` if it is missing.
    fn words(&self, method: &'static str) -> Result<Option<String>> {
        let ScriptConnection { plugin, client, .. } = &*self.connection;
        Ok(match plugin.words(method, &self.token(), Some(client))? {
            (MethodResult::Done, printed) => {
                Some(String::from_utf8_lossy(parse::line(&printed)).into_owned())
            }
            _ => None,
        })
    }

    fn ask_level(&self, method: &'static str) -> Result<Option<ScriptAbility>> {
        let Some(text) = self.words(method)? else { return Ok(None) };
        match text.to_ascii_lowercase().as_str() {
            "none" => Ok(Some(ScriptAbility::None)),
            "emulate" => Ok(Some(ScriptAbility::Emulate)),
            "native" => Ok(Some(ScriptAbility::Native)),
            _ => {
                let why = format!("printed {text:?}, which is neither none, emulate nor native");
                Err(self.connection.wrong(method, &why))
            }
        }
    }

    fn ask_size(&self) -> Result<u64> {
        match self.words("get_size")? {
            None => Err(self.connection.wrong("get_size", "the method is required")),
            Some(text) => parse::size(&text).ok_or_else(|| {
                self.connection.wrong("get_size", &format!("printed {text:?}, which is no size"))
            }),
        }
    }

    /// The limits enforced here, and those to advertise.
    fn ask_block_size(&self, size: u64) -> Result<(BlockSizes, Option<BlockSizes>)> {
        let Some(text) = self.words("block_size")? else {
            return Ok((BlockSizes::default(), None));
        };
        let reported = parse::block_size(&text);
        let reported = reported.map_err(|why| self.connection.wrong("block_size", &why))?;
        let served = self.connection.served;
        let kept = reported.map_or_else(BlockSizes::default, |sizes| sizes.enforced(served, size));
        Ok((kept, reported))
    }

    fn ask_description(&self) -> String {
        match self.words("export_description") {
            Ok(text) => text.unwrap_or_default(),
            Err(error) => {
                log::warn!("{error}");
                String::new()
            }
        }
    }

    /// Carries out a request, and blocks until it is done.
    fn perform(&self, request: Request) -> Outcome {
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let mut buf = room.into_buf();
                self.read(at, &mut buf)?;
                Ok(Reply::Data(buf.into()))
            }
            Op::Write(data) => self.durably(flags, |fua| self.write(at, data.bytes(), fua)),
            Op::Zero => self.durably(flags, |fua| self.zero(at, len, flags, fua)),
            Op::Trim => self.durably(flags, |fua| {
                let words = if fua { "fua" } else { "" };
                self.each_piece("trim", at, len, Some(words))
            }),
            Op::Flush => self.change("flush", &self.token(), &[]).map(|_| Reply::Done),
            Op::Cache => self.cache(at, len).map(|()| Reply::Done),
            Op::Extents(_) => self.extents(at, len, flags).map(|list| Reply::Extents(vec![list])),
        }
    }

    /// Runs a change with the script's own FUA, or followed by a flush.
    fn durably(&self, flags: RequestFlags, change: impl FnOnce(bool) -> Result<()>) -> Outcome {
        let fua = flags.contains(RequestFlags::FUA);
        let native = fua && self.fua == ScriptAbility::Native;
        change(native)?;
        if fua && !native {
            self.change("flush", &self.token(), &[])?;
        }
        Ok(Reply::Done)
    }

    fn change(
        &self,
        method: &'static str,
        args: &[OsString],
        input: &[u8],
    ) -> Result<MethodResult> {
        let ScriptConnection { plugin, client, .. } = &*self.connection;
        plugin.call(method, args, input, Some(client))
    }

    /// Arguments of a request: handle, length, offset, and flags where the method has any.
    fn range(&self, at: u64, len: u64, flags: Option<&str>) -> Vec<OsString> {
        let mut args = vec![self.token.clone(), len.to_string().into(), at.to_string().into()];
        args.extend(flags.map(OsString::from));
        args
    }

    fn each_piece(
        &self,
        method: &'static str,
        at: u64,
        len: u64,
        flags: Option<&str>,
    ) -> Result<()> {
        for (at, count) in pieces(at, len, RANGE_MAX) {
            // A missing method has nothing to do.
            self.change(method, &self.range(at, count, flags), &[])?;
        }
        Ok(())
    }

    fn read(&self, at: u64, buf: &mut Buf) -> Result<()> {
        let ScriptConnection { plugin, client, .. } = &*self.connection;
        let len = buf.len() as u64;
        let args = self.range(at, len, None);
        match plugin.fill("pread", &args, buf, Some(client))? {
            (MethodResult::Done, printed) if printed == len => Ok(()),
            (MethodResult::Done, printed) => {
                let why = format!("printed {printed} bytes instead of {len}");
                Err(self.connection.wrong("pread", &why))
            }
            _ => Err(self.connection.wrong("pread", "the method is required")),
        }
    }

    fn write(&self, at: u64, bytes: &[u8], fua: bool) -> Result<()> {
        let flags = if fua { "fua" } else { "" };
        match self.change("pwrite", &self.range(at, bytes.len() as u64, Some(flags)), bytes)? {
            MethodResult::Missing => Err(self.connection.wrong("pwrite", "not implemented")),
            _ => Ok(()),
        }
    }

    fn zero(&self, at: u64, len: u64, flags: RequestFlags, fua: bool) -> Result<()> {
        for (at, count) in pieces(at, len, RANGE_MAX) {
            self.zero_piece(at, count, flags, fua)?;
        }
        Ok(())
    }

    /// The script's zero, or writes if that is not supported.
    fn zero_piece(&self, at: u64, len: u64, flags: RequestFlags, fua: bool) -> Result<()> {
        let fast = flags.contains(RequestFlags::FAST);
        if self.native_zero {
            let words = [
                ("fua", fua),
                ("may_trim", !flags.contains(RequestFlags::NO_HOLE)),
                ("fast", fast),
            ];
            let words: Vec<_> =
                words.into_iter().filter(|word| word.1).map(|word| word.0).collect();
            match self.change("zero", &self.range(at, len, Some(&words.join(","))), &[]) {
                Ok(MethodResult::Missing) => {}
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == Kind::Unsupported && !fast => {}
                Err(error) => return Err(error),
            }
        }
        if fast {
            return Err(Error::new(Kind::Unsupported, "zeroing is no faster than writing here"));
        }
        let most = u64::from(self.facts.block.maximum).min(Data::ZEROES_MAX as u64);
        let most = most - most % u64::from(self.facts.block.minimum.max(1));
        for (at, piece) in pieces(at, len, most.max(1)) {
            self.write(at, Data::zeroes(piece as usize).bytes(), fua)?;
        }
        Ok(())
    }

    fn cache(&self, at: u64, len: u64) -> Result<()> {
        if self.cache != ScriptAbility::Emulate {
            return self.each_piece("cache", at, len, None);
        }
        let size = u64::from(self.facts.block.maximum).min(WARM).min(len);
        let mut buf = Buf::unpooled(usize::try_from(size).expect("bounded just above"));
        for (at, count) in pieces(at, len, size) {
            buf.truncate(count as usize);
            self.read(at, &mut buf)?;
        }
        Ok(())
    }

    fn extents(&self, at: u64, len: u64, flags: RequestFlags) -> Result<Extents> {
        let ScriptConnection { plugin, client, .. } = &*self.connection;
        let one = flags.contains(RequestFlags::ONE_EXTENT);
        let words = if one { "req_one" } else { "" };
        let args = self.range(at, len.min(RANGE_MAX), Some(words));
        let (MethodResult::Done, printed) = plugin.words("extents", &args, Some(client))? else {
            let why = "can_extents says yes, but there is no such method";
            return Err(self.connection.wrong("extents", why));
        };
        let text = String::from_utf8_lossy(&printed);
        let mut extents = parse::extents(&text, at, self.facts.size)
            .map_err(|why| self.connection.wrong("extents", &why))?;
        extents.truncate(len);
        if one {
            extents.first_only();
        }
        Ok(extents)
    }
}

impl Drop for ScriptHandle {
    fn drop(&mut self) {
        let connection = self.connection.clone();
        let token = self.token();
        self.connection.lane.run(move || {
            let client = Some(&connection.client);
            if let Err(error) = connection.plugin.call("close", &token, &[], client) {
                log::warn!("{error}");
            }
            drop(connection);
        });
    }
}

/// A range in pieces of at most `most` bytes.
fn pieces(at: u64, len: u64, most: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let count = (len - done).min(most);
        let piece = (at + done, count);
        done += count;
        (count > 0).then_some(piece)
    })
}
