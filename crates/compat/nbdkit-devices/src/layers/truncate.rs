//! `truncate`: truncates the device, or extends it with zeroes.

use std::sync::Arc;

use blockhaul_block::{
    ContextSet, Device, Error, Extents, Facts, FileRange, HOLE, Hints, Kind, LeaseAccess, Op,
    PendingRequest, Reply, Request, Result, ZERO,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::{Data, Reservation, is_zero};

use blockhaul_layers::support::ScratchMemory;
use blockhaul_layers::support::{layer, param, usage};

/// The layer `truncate`.
pub static TRUNCATE: LayerKind = LayerKind {
    name: "truncate",
    summary: "truncates the device, or extends it with a range of zeroes",
    manual: "First `truncate` sets the size, then `round-up` or `round-down` makes it a multiple. The range \
beyond the end of the device below reads as zeroes and is a hole; zeroes may be written there, \
other bytes are refused (ENOSPC). With `round-up=512`, a file of any size can be served to \
clients that need whole sectors.",
    example: r#"
blockhaul serve --layer 'truncate?round-up=1M' sample:1000k \
  --run 'blockhaul info --size "$uri"'
"#,
    needs_content: false,
    writes_below: true,
    transparent: false,
    params: &[
        param("truncate", ParamKind::Size, "New size [default: that of the device below]."),
        param("round-up", ParamKind::Size, "Round the size up to a multiple of this."),
        param("round-down", ParamKind::Size, "Round the size down to a multiple of this."),
    ],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let fixed = args.size("truncate");
    let up = args.size("round-up");
    let down = args.size("round-down");
    if up == Some(0) || down == Some(0) {
        return Err(usage("truncate: round-up and round-down must be above 0"));
    }
    layer(move |inner| {
        let below = inner.facts();
        // The extension reads as zeroes, too, and has extents.
        let kept = Hints::ZEROED
            | Hints::TAKES_PARKED
            | Hints::CLAIMS_ROOM
            | Hints::FLUSH_FAILURES_STAY
            | Hints::IN_FLIGHT
            | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        let real = facts.size;
        let mut size = Some(fixed.unwrap_or(real));
        if let Some(up) = up {
            size = size.and_then(|size| size.checked_next_multiple_of(up));
        }
        if let Some(down) = down {
            size = size.map(|size| size - size % down);
        }
        let size = size.filter(|&size| i64::try_from(size).is_ok());
        facts.size = size.ok_or_else(|| usage("truncate: more than 2^63 - 1 bytes"))?;
        let scratch = ScratchMemory::for_device(&inner);
        Ok(Arc::new(TruncateDevice { inner, facts: Arc::new(facts), real, scratch }))
    })
}

struct TruncateDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// Size of the device below.
    real: u64,
    scratch: ScratchMemory,
}

impl Device for TruncateDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let end = request.end().unwrap_or(u64::MAX);
        if end <= self.real || matches!(request.op, Op::Flush) {
            return self.inner.submit(request);
        }
        let inside = self.real.saturating_sub(request.at);
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(_) if inside == 0 => PendingRequest::ready(Ok(Reply::Hole)),
            Op::Read(room) => self.read(at, room, inside),
            Op::Write(data) => self.write(at, data, inside, flags),
            Op::Extents(contexts) if inside == 0 => {
                PendingRequest::ready(Ok(Reply::Extents(self.behind(contexts, len))))
            }
            // The rest is beyond the end; the caller requests it again.
            Op::Extents(_) => self.inner.submit(Request { op, at, len: inside, flags }),
            _ if inside == 0 => PendingRequest::ready(Ok(Reply::Done)),
            op => self.inner.submit(Request { op, at, len: inside, flags }),
        }
    }

    fn file_at(&self, at: u64, len: u64, access: LeaseAccess) -> Option<FileRange> {
        let inside = self.real.min(self.facts.size).checked_sub(at)?;
        (inside > 0).then(|| self.inner.file_at(at, len.min(inside), access))?
    }
}

impl TruncateDevice {
    /// A read that extends beyond the end of the device below.
    fn read(&self, at: u64, room: Reservation, inside: u64) -> PendingRequest {
        let inner = self.inner.clone();
        let scratch = self.scratch.clone();
        PendingRequest::start(async move {
            // A late reservation needs its memory before the data arrives: reads use scratch
            // memory.
            let mut buf = room.claim().await.into_buf();
            let (front, back) = buf.split_at_mut(inside as usize);
            if !scratch.fill(&inner, at, front).await? {
                return Ok(Reply::Hole);
            }
            back.fill(0);
            Ok(Reply::Data(buf.into()))
        })
    }

    fn write(
        &self,
        at: u64,
        data: Data,
        inside: u64,
        flags: blockhaul_block::RequestFlags,
    ) -> PendingRequest {
        let inside = inside as usize;
        if let Err(error) = data.load() {
            return Error::system("cannot read what is to be written", error).into();
        }
        if !is_zero(&data.bytes()[inside..]) {
            let text = format!("only zeroes can be written beyond the {} bytes below", self.real);
            return Error::new(Kind::NoSpace, text).into();
        }
        match inside {
            0 => PendingRequest::ready(Ok(Reply::Done)),
            _ => self.inner.submit(Request::write(at, data.slice(0, inside)).with(flags)),
        }
    }

    /// Extents beyond the end: a hole in `base:allocation`, nothing in other contexts.
    fn behind(&self, contexts: ContextSet, len: u64) -> Vec<Extents> {
        let base = |index: usize| {
            self.facts
                .contexts
                .get(index)
                .is_some_and(|name| name == blockhaul_block::BASE_ALLOCATION)
        };
        let states = contexts.iter().map(|index| if base(index) { HOLE | ZERO } else { 0 });
        states.map(|state| Extents::one(len, state)).collect()
    }
}
