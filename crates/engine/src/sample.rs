//! A digest of samples of a device: cheap, and different when a disk was exchanged or went on living.

use block::{Error, Kind, Reply, Request, Result};
use io::Room;

use crate::end::End;

/// Places that are looked at, spread evenly; the first and the last block are among them, where
/// partition tables and many file systems keep what changes.
const PLACES: u64 = 64;
/// Bytes of a sample.
const BLOCK: u64 = 64 << 10;
/// Samples under way at a time.
const IN_FLIGHT: usize = 16;

/// Reads the samples, and digests them in order.
pub(crate) async fn digest(source: End) -> Result<[u8; 32]> {
    let facts = source.facts();
    let most = u64::from(facts.block.maximum.max(facts.block.minimum));
    let block = BLOCK.min(most);
    let last = facts.size.saturating_sub(block) / block * block;
    let mut places: Vec<u64> =
        (0..PLACES).map(|place| last / block * place / (PLACES - 1) * block).collect();
    places.push(last);
    places.dedup();
    let source = std::rc::Rc::new(source);
    let mut hasher = blake3::Hasher::new();
    for group in places.chunks(IN_FLIGHT) {
        let reads: Vec<_> = group
            .iter()
            .map(|&at| {
                let len = block.min(facts.size - at);
                io::start(read(source.clone(), at, len))
            })
            .collect();
        // All are awaited, also after an error.
        let mut blocks = Vec::with_capacity(reads.len());
        for read in reads {
            blocks.push(read.await);
        }
        for block in blocks {
            hasher.update(&block?);
        }
    }
    Ok(hasher.finalize().into())
}

async fn read(source: std::rc::Rc<End>, at: u64, len: u64) -> Result<[u8; 32]> {
    if len == 0 {
        return Ok(blake3::hash(&[]).into());
    }
    let mut attempts = 0;
    loop {
        let generation = source.generation();
        let request = Request::read(at, Room::unpooled(len as usize));
        match source.device().submit(request).await {
            Ok(Reply::Data(data)) => return Ok(blake3::hash(data.bytes()).into()),
            Ok(Reply::Hole) => return Ok(blake3::hash(&vec![0; len as usize]).into()),
            Ok(_) => return Err(Error::new(Kind::Io, "the device gave no data for a read")),
            Err(error) => source.recover(error, generation, &mut attempts).await?,
        }
    }
}
