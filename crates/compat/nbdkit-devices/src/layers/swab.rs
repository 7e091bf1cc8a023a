//! `swab`: swaps the bytes of every word.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use blockhaul_block::{
    BASE_ALLOCATION, BlockSizes, ContextSet, Device, Extents, Facts, Hints, Op, PendingRequest,
    Reply, Request, RequestFlags, Result,
};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::{Buf, Data};

use blockhaul_layers::support::{ScratchMemory, layer, param_or, whole_size};

/// The layer `swab`.
pub static SWAB: LayerKind = LayerKind {
    name: "swab",
    summary: "swaps the bytes of every word",
    manual: "For disks of machines with the other byte order. `swab-bits` is the length of a word; 8 \
changes nothing. If the size of the device is not a multiple of the word, a warning says \
so, and the bytes after the last whole word are not accessible.",
    example: r#"
printf 1234 > words && blockhaul copy --source-layer 'swab?swab-bits=16' words -
"#,
    needs_content: false,
    writes_below: true,
    transparent: false,
    params: &[param_or(
        "swab-bits",
        ParamKind::Choice(&["8", "16", "32", "64"]),
        "16",
        "Word size in bits.",
    )],
    changeable: &[],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let word = args.number("swab-bits").unwrap_or(16) as usize / 8;
    let warned = AtomicBool::new(false);
    layer(move |inner| {
        if word == 1 {
            return Ok(inner);
        }
        let below = inner.facts();
        // Bytes are swapped in the buffer filled by the device below; written data is read.
        let kept = Hints::ZEROED
            | Hints::CLAIMS_ROOM
            | Hints::FLUSH_FAILURES_STAY
            | Hints::IN_FLIGHT
            | Hints::EXTENTS;
        let mut facts = Facts::over(&below).keeping(&below, kept);
        let minimum = facts.block.minimum.max(word as u32);
        facts.block = BlockSizes { minimum, ..facts.block };
        facts.size = whole_size(&facts, minimum, "swab", &warned);
        let scratch = ScratchMemory::for_device(&inner);
        Ok(Arc::new(SwabDevice { inner, facts: Arc::new(facts), word, scratch }))
    })
}

struct SwabDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// Length of a word in bytes.
    word: usize,
    scratch: ScratchMemory,
}

impl Device for SwabDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let inner = self.inner.clone();
        let scratch = self.scratch.clone();
        let word = self.word;
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let reading = inner.submit(Request::read(at, room.in_memory()));
                PendingRequest::start(async move {
                    let Reply::Data(found) = reading.await? else { return Ok(Reply::Hole) };
                    let mut buf = found.try_into_buf().unwrap_or_else(|shared| {
                        let mut buf = Buf::unpooled(shared.len());
                        buf.copy_from_slice(shared.bytes());
                        buf
                    });
                    swap(&mut buf, word);
                    Ok(Reply::Data(buf.into()))
                })
            }
            Op::Write(data) => PendingRequest::start(async move {
                let data = match data.try_into_buf() {
                    Ok(mut buf) => {
                        swap(&mut buf, word);
                        return inner.submit(Request::write(at, Data::from(buf)).with(flags)).await;
                    }
                    Err(shared) => shared,
                };
                let mut done = 0;
                let piece = scratch.piece() as usize;
                for piece in data.bytes().chunks((piece - piece % word).max(word)) {
                    let mut buf = scratch.room(piece.len() as u64).await?.into_buf();
                    buf.copy_from_slice(piece);
                    swap(&mut buf, word);
                    inner.submit(Request::write(at + done, buf.into()).with(flags)).await?;
                    done += piece.len() as u64;
                }
                Ok(Reply::Done)
            }),
            Op::Extents(contexts) => {
                let asked = inner.submit(Request::extents(at, len, contexts).with(flags));
                PendingRequest::start(async move {
                    let Reply::Extents(lists) = asked.await? else { return Ok(Reply::Done) };
                    let whole = |run: &blockhaul_block::Extent| run.len.is_multiple_of(word as u64);
                    if lists.iter().all(|list| list.runs().iter().all(whole)) {
                        return Ok(Reply::Extents(lists));
                    }
                    let mut lists = Vec::new();
                    for index in contexts.iter() {
                        let mut list = in_words(&*inner, at, len, index, word as u64).await?;
                        if flags.contains(RequestFlags::ONE_EXTENT) {
                            list.first_only();
                        }
                        lists.push(list);
                    }
                    Ok(Reply::Extents(lists))
                })
            }
            op => inner.submit(Request { op, at, len, flags }),
        }
    }
}

/// The extents in a context from `at` on, in whole words, as each byte of a word may move to the
/// position of another.
async fn in_words(
    inner: &dyn Device,
    at: u64,
    len: u64,
    index: usize,
    word: u64,
) -> Result<Extents> {
    let facts = inner.facts();
    let base = facts.contexts.get(index).is_some_and(|name| name == BASE_ALLOCATION);
    let context = ContextSet::default().with(index);
    let mut found = Extents::new();
    // At least the first word.
    while found.total() < len.min(word) {
        let asked = Request::extents(at + found.total(), len - found.total(), context);
        let Reply::Extents(lists) = inner.submit(asked).await? else { break };
        let before = found.total();
        for run in lists.iter().flat_map(Extents::runs) {
            found.push(run.len.min(len - found.total()), run.state);
        }
        if found.total() == before {
            break;
        }
    }
    // A word is a hole or zero only if all of it is; in other contexts it has the flags of any
    // part.
    Ok(found.in_blocks(word, |one, other| if base { one & other } else { one | other }))
}

/// Reverses every word.
fn swap(bytes: &mut [u8], word: usize) {
    bytes.chunks_exact_mut(word).for_each(<[u8]>::reverse);
}
