//! `swab`: swaps the bytes of every word.

use std::sync::Arc;

use block::{
    Args, BlockSizes, Device, Facts, Layer, Op, ParamKind, Pending, Reply, Request, Result,
};
use io::{Buf, Data};

use crate::declared::{Declared, layer, param_or};
use crate::scratch::Scratch;

/// The layer `swab`.
pub static SWAB: Declared = Declared {
    name: "swab",
    summary: "swaps the bytes of every word",
    manual: "Disks of machines with the other order of bytes. `swab-bits` is the length of a word; 8 \
changes nothing. Bytes at the end of the device that are no whole word are left out.",
    example: r#"
printf 1234 > words && blockhaul copy --source-layer 'swab?swab-bits=16' words -
"#,
    needs_content: false,
    params: &[param_or(
        "swab-bits",
        ParamKind::Choice(&["8", "16", "32", "64"]),
        "16",
        "Bits of a word.",
    )],
    configure: |args| configure(args),
};

fn configure(args: &Args) -> Result<Arc<dyn Layer>> {
    let word = args.number("swab-bits").unwrap_or(16) as usize / 8;
    layer(move |inner| {
        if word == 1 {
            return Ok(inner);
        }
        let mut facts = Facts::clone(&inner.facts());
        let minimum = facts.block.minimum.max(word as u32);
        facts.block = BlockSizes { minimum, ..facts.block };
        facts.size -= facts.size % u64::from(minimum);
        facts.takes_parked = false;
        let scratch = Scratch::for_device(&inner);
        Ok(Arc::new(SwabDevice { inner, facts: Arc::new(facts), word, scratch }))
    })
}

struct SwabDevice {
    inner: Arc<dyn Device>,
    facts: Arc<Facts>,
    /// Bytes of a word.
    word: usize,
    scratch: Scratch,
}

impl Device for SwabDevice {
    fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    fn submit(&self, request: Request) -> Pending {
        let (inner, scratch, word) = (self.inner.clone(), self.scratch.clone(), self.word);
        let Request { op, at, len, flags } = request;
        match op {
            Op::Read(room) => {
                let reading = inner.submit(Request::read(at, room.in_memory()));
                Pending::start(async move {
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
            Op::Write(data) => Pending::start(async move {
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
            op => inner.submit(Request { op, at, len, flags }),
        }
    }
}

/// Reverses every word.
fn swap(bytes: &mut [u8], word: usize) {
    bytes.chunks_exact_mut(word).for_each(<[u8]>::reverse);
}
