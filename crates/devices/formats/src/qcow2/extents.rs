//! Extents, from tables alone: no data is read.

use blockhaul_block::{
    Can, Contexts, Error, Extents, Flags, HOLE, Kind, Outcome, Reply, Request, Result, ZERO,
};

use super::entry::{Place, Run};
use super::parts::{FIRST_BITMAP, Parts, base_of};

/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;
/// Entries of tables that are looked at without a pause, and the number of pauses for one reply.
const STRETCH: u64 = 64 << 10;
const STRETCHES_MAX: u64 = 128;

/// A file is sparse if more than this part of it are holes: there are some in others, too, where
/// clusters were freed.
const SPARSE: u64 = 8;

/// What a list says about a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    /// Holes and zeroes.
    Allocation,
    /// Which image of the chain has the bytes: 1 for this one, 0 for none.
    Depth,
}

impl What {
    /// The state of what no image has.
    fn nothing(self) -> u64 {
        match self {
            What::Allocation => HOLE | ZERO,
            What::Depth => 0,
        }
    }
}

/// One list for each context.
pub(super) async fn list(
    parts: &Parts,
    at: u64,
    end: u64,
    contexts: Contexts,
    flags: Flags,
) -> Outcome {
    let one = flags.contains(Flags::ONE_EXTENT);
    let most = if one { 1 } else { RUNS_MAX };
    let mut lists = Vec::with_capacity(contexts.count());
    for number in contexts.iter() {
        let mut list = match number {
            0 => of_chain(parts, What::Allocation, at, end, most).await?,
            1 => of_chain(parts, What::Depth, at, end, most).await?,
            number => of_bitmap(parts, number, at, end, most).await?,
        };
        if one {
            list.first_only();
        }
        lists.push(list);
    }
    Ok(Reply::Extents(lists))
}

async fn of_bitmap(
    parts: &Parts,
    number: usize,
    at: u64,
    end: u64,
    most: usize,
) -> Result<Extents> {
    let none = || Error::new(Kind::Invalid, "the device has no such context");
    let place = number.checked_sub(FIRST_BITMAP).ok_or_else(none)?;
    let own = &parts.image.bitmaps;
    if let Some(bitmap) = own.get(place) {
        return bitmap.extents(&parts.file, at, end, most).await;
    }
    let backing = parts.backing.as_ref().ok_or_else(none)?;
    let context = backing.bitmaps.get(place - own.len()).ok_or_else(none)?;
    if at < backing.size {
        return below(&backing.device, at, end.min(backing.size), *context).await;
    }
    let mut all = Extents::new();
    all.push(end - at, 0);
    Ok(all)
}

/// The states of a range, at least of its first byte.
async fn of_chain(parts: &Parts, what: What, at: u64, end: u64, most: usize) -> Result<Extents> {
    let mut all = Extents::new();
    let mut next = at;
    for _ in 0..STRETCHES_MAX {
        if next >= end || all.len() > most {
            break;
        }
        if next > at {
            // Tables in the cache never wait.
            blockhaul_io::yield_now().await;
        }
        let mut entries = STRETCH;
        let image = &parts.image;
        let runs = match image.some_runs(&parts.file, next, end, most, &mut entries).await {
            Ok(runs) => runs,
            // Report what is known; the error recurs when the rest is requested.
            Err(_) if !all.is_empty() => break,
            Err(error) => return Err(error),
        };
        for run in runs {
            let known = all.total();
            add(parts, what, run, most, &mut all)
                .await
                .or_else(|error| if all.is_empty() { Err(error) } else { Ok(()) })?;
            // Exact, but where a list below was short.
            if all.total() - known < run.len || all.len() > most {
                return Ok(all);
            }
            next = run.end();
        }
    }
    Ok(all)
}

/// Appends the states of a run, or of its first part.
async fn add(parts: &Parts, what: What, run: Run, most: usize, all: &mut Extents) -> Result<()> {
    let state = match (what, run.place) {
        (_, Place::Unallocated) => return add_below(parts, what, run, most, all).await,
        (What::Allocation, Place::Data(host)) if may_have_holes(parts).await => {
            return add_data(parts, run, host, most, all).await;
        }
        (What::Depth, _) => 1,
        (What::Allocation, Place::Data(_) | Place::Packed { .. }) => 0,
        (What::Allocation, Place::Zero { stored: true }) => ZERO,
        (What::Allocation, Place::Zero { stored: false }) => HOLE | ZERO,
    };
    all.push(run.len, state);
    Ok(())
}

/// The states of what this image does not have.
async fn add_below(
    parts: &Parts,
    what: What,
    run: Run,
    most: usize,
    all: &mut Extents,
) -> Result<()> {
    let backing = parts.backing.as_ref().filter(|backing| run.at < backing.size);
    let Some(backing) = backing else {
        all.push(run.len, what.nothing());
        return Ok(());
    };
    let until = run.end().min(backing.size);
    let contexts = match (what, backing.depth) {
        (What::Allocation, _) => backing.base,
        (What::Depth, Some(depth)) => depth,
        (What::Depth, None) => {
            // A raw file has all of its bytes.
            all.push(until - run.at, 2);
            all.push(run.end() - until, what.nothing());
            return Ok(());
        }
    };
    let mut next = run.at;
    while next < until && all.len() <= most {
        let found = below(&backing.device, next, until, contexts).await?;
        next += found.total();
        for extent in found.runs() {
            let state = match what {
                What::Depth if extent.state > 0 => extent.state.saturating_add(1),
                _ => extent.state,
            };
            all.push(extent.len, state);
        }
    }
    if next >= until {
        all.push(run.end() - until, what.nothing());
    }
    Ok(())
}

/// Whether clusters with data may be holes of their file: in external data files, and in images
/// whose clusters were all allocated when they were created, but never written
/// (`preallocation=metadata`). Other files are not asked for each run.
async fn may_have_holes(parts: &Parts) -> bool {
    if parts.is_external {
        return true;
    }
    if parts.image.writer.is_some() {
        return false;
    }
    if let Some(known) = parts.image.is_sparse.get() {
        return *known;
    }
    let facts = parts.data.facts();
    let is_known = facts.can.contains(Can::EXTENTS) && !facts.emulated.contains(Can::EXTENTS);
    let found = if is_known && facts.size > 0 {
        below(&parts.data, 0, facts.size, base_of(&facts)).await.ok()
    } else {
        None
    };
    let zero = |list: &Extents| {
        let runs = list.runs().iter().filter(|run| run.state & ZERO != 0);
        runs.map(|run| run.len).sum::<u64>()
    };
    let is_sparse = found.is_some_and(|list| zero(&list) > list.total() / SPARSE);
    *parts.image.is_sparse.get_or_init(|| is_sparse)
}

/// The states of bytes of the file with the data, which may have holes.
async fn add_data(
    parts: &Parts,
    run: Run,
    host: u64,
    most: usize,
    all: &mut Extents,
) -> Result<()> {
    let inside = run.len.min(parts.data_len().saturating_sub(host));
    let contexts = base_of(&parts.data.facts());
    let mut done = 0;
    while done < inside && all.len() <= most {
        let found = below(&parts.data, host + done, host + inside, contexts).await?;
        done += found.total();
        found.runs().iter().for_each(|extent| all.push(extent.len, extent.state));
    }
    if done >= inside {
        all.push(run.len - inside, ZERO);
    }
    Ok(())
}

/// The extents of a range of a device below, at least of its first byte.
async fn below(
    device: &std::sync::Arc<dyn blockhaul_block::Device>,
    at: u64,
    end: u64,
    contexts: Contexts,
) -> Result<Extents> {
    match device.submit(Request::extents(at, end - at, contexts)).await? {
        Reply::Extents(lists) => lists.into_iter().next().ok_or_else(Error::misfit),
        _ => Err(Error::misfit()),
    }
}
