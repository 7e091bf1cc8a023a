//! Extents of a disk in an image, from tables alone: no data is read.

use std::sync::Arc;

use blockhaul_block::{
    BASE_ALLOCATION, ContextSet, Device, Error, Extents, Facts, Outcome, Reply, Request,
    RequestFlags, Result,
};

use crate::assembly::{DiskRun, RunReader};

/// Number of runs that is enough for one reply.
const RUNS_MAX: usize = 64 << 10;
/// Entries of tables that are looked at without a pause, and the number of pauses for one reply.
const STRETCH: u64 = 64 << 10;
const STRETCHES_MAX: u64 = 128;

/// An image whose runs have states.
pub(crate) trait StateReader: RunReader {
    /// The kinds of lists.
    type List: Copy;

    /// The runs of a range, at least one; ends early when there are `most`, or when `steps` entries of tables
    /// were looked at, which is counted down.
    async fn next_runs(
        &self,
        range: (u64, u64),
        most: usize,
        steps: &mut u64,
    ) -> Result<Vec<DiskRun<Self::Place>>>;

    /// Appends the states of a run, or of its first part.
    async fn add(
        &self,
        list: Self::List,
        run: DiskRun<Self::Place>,
        most: usize,
        all: &mut Extents,
    ) -> Result<()>;

    /// The states of a range, at least of its first byte.
    async fn states(
        &self,
        list: Self::List,
        (at, end): (u64, u64),
        most: usize,
    ) -> Result<Extents> {
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
            let runs = match self.next_runs((next, end), most, &mut steps).await {
                Ok(runs) => runs,
                // Report what is known; the error recurs when the rest is requested.
                Err(_) if !all.is_empty() => break,
                Err(error) => return Err(error),
            };
            for run in runs {
                let known = all.total();
                match self.add(list, run, most, &mut all).await {
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
}

/// One list for each context; `list` makes one, of about as many runs as its second argument.
pub(crate) async fn lists(
    contexts: ContextSet,
    flags: RequestFlags,
    list: impl AsyncFn(usize, usize) -> Result<Extents>,
) -> Outcome {
    let one = flags.contains(RequestFlags::ONE_EXTENT);
    let most = if one { 1 } else { RUNS_MAX };
    let mut lists = Vec::with_capacity(contexts.count());
    for number in contexts.iter() {
        let mut found = list(number, most).await?;
        if one {
            found.first_only();
        }
        lists.push(found);
    }
    Ok(Reply::Extents(lists))
}

/// A place in a device below.
pub(crate) struct PlaceBelow<'a> {
    pub(crate) device: &'a Arc<dyn Device>,
    /// The context that is asked for.
    pub(crate) contexts: ContextSet,
    /// The offset.
    pub(crate) at: u64,
    /// Size of the device in bytes.
    pub(crate) size: u64,
    /// The state of what is beyond the device.
    pub(crate) beyond: u64,
}

/// Appends the states of `len` bytes of a device below, or of the first of them; `state` translates each.
pub(crate) async fn add_below(
    place: PlaceBelow<'_>,
    len: u64,
    most: usize,
    all: &mut Extents,
    state: fn(u64) -> u64,
) -> Result<()> {
    let PlaceBelow { device, contexts, at, size, beyond } = place;
    let inside = len.min(size.saturating_sub(at));
    let mut done = 0;
    while done < inside && all.len() <= most {
        let found = below(device, at + done, at + inside, contexts).await?;
        done += found.total();
        found.runs().iter().for_each(|extent| all.push(extent.len, state(extent.state)));
    }
    if done >= inside {
        all.push(len - inside, beyond);
    }
    Ok(())
}

/// The extents of a range of a device below, at least of its first byte.
pub(crate) async fn below(
    device: &Arc<dyn Device>,
    at: u64,
    end: u64,
    contexts: ContextSet,
) -> Result<Extents> {
    match device.submit(Request::extents(at, end - at, contexts)).await? {
        Reply::Extents(lists) => lists.into_iter().next().ok_or_else(Error::misfit),
        _ => Err(Error::misfit()),
    }
}

/// The context of holes and zeroes of an emulated device, which has one.
pub(crate) fn base_of(facts: &Facts) -> ContextSet {
    facts.context(BASE_ALLOCATION).unwrap_or_else(ContextSet::first)
}
