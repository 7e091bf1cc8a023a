//! Extents, from tables alone: no data is read.

use std::sync::Arc;

use blockhaul_block::{
    Contexts, Device, Error, Extents, Flags, HOLE, Outcome, Reply, Request, Result, ZERO,
};

use super::map::{Place, Run};
use super::parts::{Parts, base_of};

/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;
/// Entries of tables that are looked at without a pause, and the number of pauses for one reply.
const STRETCH: u64 = 64 << 10;
const STRETCHES_MAX: u64 = 128;

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
    for _ in contexts.iter() {
        let mut list = allocation(parts, at, end, most).await?;
        if one {
            list.first_only();
        }
        lists.push(list);
    }
    Ok(Reply::Extents(lists))
}

/// The states of a range, at least of its first byte.
async fn allocation(parts: &Parts, at: u64, end: u64, most: usize) -> Result<Extents> {
    let mut all = Extents::new();
    let mut next = at;
    for _ in 0..STRETCHES_MAX {
        if next >= end || all.len() > most {
            break;
        }
        if next > at {
            // Tables in memory never wait.
            blockhaul_io::yield_now().await;
        }
        let mut steps = STRETCH;
        let runs = match parts.image.runs(&parts.files, (next, end), most, &mut steps).await {
            Ok(runs) => runs,
            // Report what is known; the error recurs when the rest is requested.
            Err(_) if !all.is_empty() => break,
            Err(error) => return Err(error),
        };
        for run in runs {
            let known = all.total();
            match add(parts, run, most, &mut all).await {
                Err(error) if all.is_empty() => return Err(error),
                _ => {}
            }
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
async fn add(parts: &Parts, run: Run, most: usize, all: &mut Extents) -> Result<()> {
    match (run.place, &parts.backing) {
        (Place::Data { file, at }, _) if parts.image.map.is_flat(file) => {
            let device = parts.files.get(file).ok_or_else(Error::misfit)?;
            let len = parts.image.lens.get(file).copied().unwrap_or(0);
            let place = Below { at, size: len, beyond: ZERO };
            add_from(device, place, run.len, most, all).await
        }
        (Place::Below, Some(backing)) => {
            let size = backing.facts().size;
            let place = Below { at: run.at, size, beyond: HOLE | ZERO };
            add_from(backing, place, run.len, most, all).await
        }
        (Place::Data { .. } | Place::Packed { .. }, _) => {
            all.push(run.len, 0);
            Ok(())
        }
        (Place::Zero { stored: true }, _) => {
            all.push(run.len, ZERO);
            Ok(())
        }
        (Place::Zero { stored: false } | Place::Below, _) => {
            all.push(run.len, HOLE | ZERO);
            Ok(())
        }
    }
}

/// A place in a device below, which has `size` bytes; what is beyond them has the state `beyond`.
struct Below {
    at: u64,
    size: u64,
    beyond: u64,
}

/// Appends the states of `len` bytes of a device below, or of the first of them.
async fn add_from(
    device: &Arc<dyn Device>,
    place: Below,
    len: u64,
    most: usize,
    all: &mut Extents,
) -> Result<()> {
    let Below { at, size, beyond } = place;
    let inside = len.min(size.saturating_sub(at));
    let contexts = base_of(&device.facts());
    let mut done = 0;
    while done < inside && all.len() <= most {
        let request = Request::extents(at + done, inside - done, contexts);
        let Reply::Extents(lists) = device.submit(request).await? else {
            return Err(Error::misfit());
        };
        let found = lists.into_iter().next().ok_or_else(Error::misfit)?;
        done += found.total();
        found.runs().iter().for_each(|extent| all.push(extent.len, extent.state));
    }
    if done >= inside {
        all.push(len - inside, beyond);
    }
    Ok(())
}
