//! `luks`: the decrypted contents of a LUKS1 container.
//!
//! - `header`: the container's header and its key slots. `derive`: keys from passphrases. `cipher`:
//!   encrypts and decrypts sectors.
//! - `passphrase`: the source of the passphrase.

mod cipher;
mod derive;
mod header;
mod passphrase;

use std::sync::Arc;

use blockhaul_block::{
    BlockSizes, Can, Device, DeviceExt, Error, Facts, Hints, Kind, Op, Outcome, PendingRequest,
    Reply, Request, Result,
};
use blockhaul_catalog::{Layer, LayerBase, LayerKind, OpenFuture, ParamKind};
use blockhaul_io::{Buf, Data, Reservation};

use crate::declared::{param, param_or, usage};
use crate::per_disk::PerDisk;
use crate::scratch::ScratchMemory;
use cipher::{SECTOR, Sectors};
use header::{HEADER, Header};
use passphrase::PassphraseSource;

/// Longest payload processed on the worker itself: about 100 us.
const INLINE_MAX: usize = 512 << 10;

/// The layer `luks`.
pub static LUKS: LayerKind = LayerKind {
    name: "luks",
    summary: "decrypts and encrypts a LUKS1 container",
    manual: "The device below is a LUKS container of version 1, as cryptsetup (`--type luks1`) and QEMU \
(`-f luks`) make them, with AES in mode xts or cbc (plain, plain64, essiv:sha256) or ecb; its \
content is served. Version 2 is refused.

The passphrase is read with the first connection: `passphrase=+FILE` reads the first line of a \
file, `passphrase=-FD` of an inherited descriptor, `passphrase=-` prompts for it. A passphrase \
on the command line is visible in `ps`. A wrong one is reported after all key slots have been \
tried. The time depends on the header: a container with more than `max-iterations` is refused. \
Clients that open a container at the same time try the passphrase in turn.

Ranges that were never written read as random bytes. Zeroes are written like other data, trim \
requests do nothing, and everything is reported as data.",
    example: r#"
printf secret > key && qemu-img create -f luks --object secret,id=s,file=key \
  -o key-secret=s,iter-time=10 disk.luks 16M
blockhaul serve --layer 'luks?passphrase=+key' disk.luks \
  --run 'blockhaul copy --verify sample:16M "$uri"'
"#,
    needs_content: true,
    writes_below: true,
    transparent: false,
    params: &[
        param(
            "passphrase",
            ParamKind::Text,
            "The passphrase, +FILE, -FD, or - to prompt for it.",
        ),
        param_or(
            "max-iterations",
            ParamKind::Number,
            "32000000",
            "Maximum iterations for a key of the container; the default takes about 10 s for each key \
             slot.",
        ),
    ],
    changeable: &[],
    configure: |args| {
        let Some(text) = args.text("passphrase") else {
            return Err(usage(
                "luks: requires a passphrase: passphrase=+FILE, passphrase=-FD, or - to be prompted",
            ));
        };
        let iterations = args.number("max-iterations").unwrap_or(32_000_000);
        let passphrase = Arc::new(PassphraseSource::parse(text)?);
        Ok(Arc::new(Luks { passphrase, iterations, turns: PerDisk::default() }))
    },
};

struct Luks {
    passphrase: Arc<PassphraseSource>,
    /// Maximum iterations for a key.
    iterations: u64,
    /// Only one client at a time tries the passphrase of a container.
    turns: PerDisk<Arc<blockhaul_io::RangeLocks>>,
}

impl Layer for Luks {
    fn wrap(&self, _inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        Err(Error::new(Kind::Unsupported, "luks: the container must be opened with the layer"))
    }

    fn reads_image(&self) -> bool {
        true
    }

    fn open(self: Arc<Self>, below: LayerBase) -> OpenFuture<Arc<dyn Device>> {
        Box::pin(async move {
            let source = self.passphrase.clone();
            // It may wait for user input.
            let passphrase = blockhaul_io::offload(move || source.get());
            let passphrase = passphrase.await.map_err(|lost| {
                Error::new(Kind::Io, "luks: cannot read the passphrase").because(lost)
            })??;
            let turns = self.turns.of_name(&below, || Ok(Arc::default()))?;
            open(below.device, passphrase, self.iterations, &turns).await
        })
    }
}

async fn open(
    inner: Arc<dyn Device>,
    passphrase: Arc<Vec<u8>>,
    iterations: u64,
    turns: &Arc<blockhaul_io::RangeLocks>,
) -> Result<Arc<dyn Device>> {
    let below = inner.facts();
    let name = below.name.clone();
    let wrong = |kind, why: String| Error::new(kind, format!("luks: {name}: {why}"));
    if below.size < HEADER as u64 {
        return Err(wrong(Kind::Invalid, "too short for a LUKS container".into()));
    }
    let header = inner.read(0, HEADER).await?;
    let header =
        Header::parse(header.bytes(), iterations).map_err(|(kind, why)| wrong(kind, why))?;
    let offset = header.payload * SECTOR;
    let Some(size) = below.size.checked_sub(offset) else {
        return Err(wrong(Kind::Invalid, "its payload begins beyond its end".into()));
    };
    let mut slots = Vec::new();
    for slot in header.slots.iter().filter(|slot| slot.active) {
        let len = header.material_len(slot);
        let at = slot.at * SECTOR;
        if at.checked_add(len).is_none_or(|end| end > below.size) {
            return Err(wrong(Kind::Invalid, "a key slot is beyond its end".into()));
        }
        slots.push((slot.clone(), inner.read(at, len as usize).await?.bytes().to_vec()));
    }
    let tried = slots.len();
    // Key slots are slow by design.
    let turn = turns.lock(0, 1).await;
    let sectors = header.unlock(&passphrase, slots).await;
    drop(turn);
    let sectors = sectors.map_err(|why| wrong(Kind::Unsupported, why))?;
    let Some(sectors) = sectors else {
        let text = format!("wrong passphrase: it opens none of {tried} key slots");
        return Err(wrong(Kind::Refused, text));
    };
    // Zeroes below are not zeroes above, and all data is processed.
    let kept = Hints::FLUSH_FAILURES_STAY | Hints::IN_FLIGHT;
    let mut facts = Facts::over(&below).keeping(&below, kept);
    facts.size = size - size % SECTOR;
    let none = Can::ZERO | Can::FAST_ZERO | Can::TRIM;
    facts.can -= none;
    facts.emulated -= none;
    facts.withheld -= none;
    let BlockSizes { minimum, preferred, maximum } = facts.block;
    let minimum = minimum.max(SECTOR as u32);
    facts.block = BlockSizes { minimum, preferred, maximum: maximum - maximum % minimum };
    let scratch = ScratchMemory::new(ScratchMemory::PIECE.min(u64::from(facts.block.maximum)));
    let sectors = Arc::new(sectors);
    let inside = Arc::new(LuksState { inner, offset, sectors, scratch });
    Ok(Arc::new(LuksDevice { facts: Arc::new(facts), inside }))
}

struct LuksDevice {
    facts: Arc<Facts>,
    inside: Arc<LuksState>,
}

/// State shared by requests in flight.
struct LuksState {
    inner: Arc<dyn Device>,
    /// Start of the payload in bytes.
    offset: u64,
    sectors: Arc<Sectors>,
    scratch: ScratchMemory,
}

impl Device for LuksDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let inside = self.inside.clone();
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(mut room) => {
                let kept = room.keep();
                let asked = Request::read(at + inside.offset, room.in_memory());
                let pending = inside.inner.submit(asked);
                PendingRequest::start(async move {
                    let buf = match pending.await? {
                        Reply::Data(data) => own(data),
                        // Zeroes count as encrypted data, too.
                        Reply::Hole => {
                            let room = kept.again().await.map_err(|error| {
                                Error::new(Kind::NoMemory, "no memory").because(error)
                            })?;
                            let mut buf = room.into_buf();
                            buf.fill(0);
                            buf
                        }
                        _ => return Err(Error::misfit()),
                    };
                    inside.decrypt(at, buf).await
                })
            }
            Op::Write(data) => {
                PendingRequest::start(async move { inside.write(at, data, flags).await })
            }
            Op::Flush => inside.inner.submit(Request::flush()),
            Op::Cache => inside.inner.submit(Request::cache(at + inside.offset, len)),
            // The fence rejects them.
            Op::Zero | Op::Trim | Op::Extents(_) => {
                Error::new(Kind::Unsupported, "not within a LUKS container").into()
            }
        }
    }
}

impl LuksState {
    async fn decrypt(&self, at: u64, buf: Buf) -> Outcome {
        let mut buf = buf;
        if buf.len() <= INLINE_MAX {
            self.sectors.decrypt(at / SECTOR, &mut buf)?;
            return Ok(Reply::Data(buf.into()));
        }
        let sectors = self.sectors.clone();
        let work = move || sectors.decrypt(at / SECTOR, &mut buf).map(|()| buf);
        let buf = blockhaul_io::offload(work).await;
        let buf = buf.map_err(|lost| Error::new(Kind::Io, "cannot decrypt").because(lost))??;
        Ok(Reply::Data(buf.into()))
    }

    async fn write(&self, at: u64, data: Data, flags: blockhaul_block::RequestFlags) -> Outcome {
        let mut out = Vec::new();
        let mut done = 0;
        let mut failed = None;
        while done < data.len() && failed.is_none() {
            let now = (self.scratch.piece() as usize).min(data.len() - done);
            let mut buf = self.scratch.room(now as u64).await?.into_buf();
            let from = at + done as u64;
            match self.sectors.encrypt(from / SECTOR, &data.bytes()[done..done + now], &mut buf) {
                Ok(()) => {
                    let asked = Request::write(from + self.offset, buf.into()).with(flags);
                    out.push(self.inner.submit(asked));
                }
                Err(error) => failed = Some(error),
            }
            done += now;
        }
        // All of them, also after a failure: nothing is in flight any more when this ends.
        for pending in out {
            if let Err(error) = pending.await {
                failed.get_or_insert(error);
            }
        }
        failed.map_or(Ok(Reply::Done), Err)
    }
}

/// The payload as writable memory.
fn own(data: Data) -> Buf {
    data.try_into_buf().unwrap_or_else(|data| {
        let mut buf = Reservation::unpooled(data.len()).into_buf();
        buf.copy_from_slice(data.bytes());
        buf
    })
}
