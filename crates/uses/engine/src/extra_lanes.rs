//! Lanes beyond the first: dialled while the others copy, and used only if they see the same disks.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Can, ContextSet, Device, Error, Request, RequestFlags, Result};
use blockhaul_catalog::Stack;

use crate::handle::{DIAL_MAX, differs, is_lost};
use crate::lane::Lane;
use crate::options::MultiConn;
use crate::orders::{CommandReceiver, LaneCommand};
use crate::segment_maker::first_of;
use crate::segment_queue::SegmentQueue;
use crate::shared::EngineState;
use crate::side::Side;
use crate::sides::DiskPair;

/// The state of a lane beyond the first.
enum ExtraLane {
    /// Not needed yet.
    NotMade,
    Made(Rc<Lane>),
    /// Cannot be made.
    Refused,
}

/// Takes orders for lane number `index`. The lane is made when the tuner finds that so many pay,
/// and stays for later orders.
pub(crate) async fn extra_lane(
    shared: Arc<EngineState>,
    index: usize,
    sides: DiskPair,
    mut orders: CommandReceiver,
) {
    let mut lane = ExtraLane::NotMade;
    while let Some(order) = orders.next().await {
        if let LaneCommand::Copy(queue, _) | LaneCommand::Read(queue, _) = &order
            && matches!(lane, ExtraLane::NotMade)
        {
            lane = make(&shared, index, &sides, queue).await;
        }
        match order {
            LaneCommand::Copy(queue, ending) => {
                if let ExtraLane::Made(lane) = &lane {
                    lane.copy(&queue, ending).await;
                }
            }
            LaneCommand::Read(queue, reading) => {
                if let ExtraLane::Made(lane) = &lane {
                    lane.read_segments(&queue, &reading).await;
                }
            }
            LaneCommand::End(ending) => {
                if let ExtraLane::Made(lane) = &lane {
                    lane.end(ending).await;
                }
            }
            LaneCommand::Close => {
                drop((lane, shared));
                orders.done();
                return;
            }
        }
        orders.done();
    }
}

/// Dials a lane and checks that it sees the same disks. A failure is only a warning: the copy
/// continues without the lane.
async fn make(
    shared: &Arc<EngineState>,
    index: usize,
    sides: &DiskPair,
    queue: &Arc<SegmentQueue>,
) -> ExtraLane {
    let wanted = shared.learned.slots.wait_for_places(index, || shared.stopped());
    if first_of(wanted, queue.exhausted()).await.is_none() || shared.stopped() {
        return ExtraLane::NotMade;
    }
    let prepared = if shared.reads_only {
        Ok(prepare_to_read(sides, queue).await)
    } else {
        prepare(shared, sides, queue).await
    };
    match prepared {
        Ok(Some((from, to))) => ExtraLane::Made(sides.lane(shared, from, to, false)),
        Ok(None) => ExtraLane::NotMade,
        Err(why) => {
            let first = shared.learned.tuner.no_more_lanes();
            let text = format!("continuing with fewer connections: {why}");
            // One message is enough for all of them.
            if first && index < shared.resolved.connections {
                shared.warn(text);
            } else {
                // One more than usual was only an attempt.
                log::info!("{text}");
            }
            ExtraLane::Refused
        }
    }
}

type OpenDevice = Arc<dyn Device>;

/// Handles for a further lane; `None` if all work is done before they can be used; an error if they
/// cannot be used.
async fn prepare(
    shared: &Arc<EngineState>,
    DiskPair { source, target }: &DiskPair,
    queue: &Arc<SegmentQueue>,
) -> Result<Option<(OpenDevice, OpenDevice)>, String> {
    let multi_conn = shared.resolved.multi_conn;
    if multi_conn == MultiConn::Advertised
        && let Some(stack) = [source, target].into_iter().find(|stack| !promises(stack))
    {
        return Err(format!(
            "{} does not report multi-conn; --multi-conn=auto examines further connections",
            stack.device().facts().name
        ));
    }
    let dial = async {
        let from = source.another().await?;
        let to = target.another().await?;
        Ok::<_, Error>((from, to))
    };
    // The other lanes may finish all the work before the connection is made.
    let dialled = first_of(blockhaul_io::timeout(DIAL_MAX, dial), queue.exhausted()).await;
    let (from, to) = match dialled {
        None => return Ok(None),
        Some(Ok(Ok(handles))) => handles,
        Some(Ok(Err(error))) => return Err(error.to_string()),
        Some(Err(blockhaul_io::TimeoutError)) => {
            return Err(format!("no handshake within {} s", DIAL_MAX.as_secs()));
        }
    };
    let examination = examine(shared, (source, &from), (target, &to));
    let examined = blockhaul_io::timeout(DIAL_MAX, examination);
    match first_of(examined, queue.exhausted()).await {
        None => return Ok(None),
        Some(Ok(examined)) => examined?,
        Some(Err(blockhaul_io::TimeoutError)) => {
            return Err(format!("no reply within {} s", DIAL_MAX.as_secs()));
        }
    }
    let unsure = |stack: &Stack, handle: &OpenDevice| (!promises(stack)).then(|| handle.clone());
    let from_unsure = unsure(source, &from);
    let to_unsure = unsure(target, &to);
    let examined = to_unsure.is_some();
    if multi_conn == MultiConn::Auto && (from_unsure.is_some() || examined) {
        match shared.learned.same_disk.examine(from_unsure, to_unsure, queue).await {
            Ok(()) => {}
            Err(None) => return Ok(None),
            Err(Some(why)) => return Err(why),
        }
    }
    if examined {
        shared.learned.one_disk.store(true, Ordering::Relaxed);
    }
    Ok(Some((from, to)))
}

/// Examines new handles of both sides; an error says why they cannot be used.
async fn examine(
    shared: &EngineState,
    (source, from): (&Stack, &OpenDevice),
    (target, to): (&Stack, &OpenDevice),
) -> Result<(), String> {
    let first = target.device();
    let tells_zeroes = first.facts().can.contains(Can::EXTENTS);
    if target.has_more() && tells_zeroes && !shared.retries.lost_target() {
        // The zeroes that the target has reported so far are valid on a later connection only if
        // both belong to the same run of the server: then the first connection is still alive. The
        // target is not read for this check; its zero report may have avoided that.
        let least = u64::from(first.facts().block.minimum.max(1));
        let question =
            Request::extents(0, least, ContextSet::first()).with(RequestFlags::ONE_EXTENT);
        let alive = first.submit(question).await;
        if alive.is_err_and(|error| is_lost(&error)) {
            shared.retries.lose_target();
        }
    }
    if let Some(why) = differs(source, from).or_else(|| differs(target, to)) {
        return Err(why);
    }
    let Some(marker) = shared.retries.marker() else { return Ok(()) };
    for (side, handle) in [(Side::Source, from), (Side::Target, to)] {
        match marker.differs(side, &**handle).await {
            Ok(None) => {}
            Ok(Some(why)) => return Err(why),
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

/// Handles for a further lane that only reads: the first ones again where others may show another
/// disk, or cannot be made. `None` if all work is done before they can be used.
async fn prepare_to_read(
    DiskPair { source, target }: &DiskPair,
    queue: &Arc<SegmentQueue>,
) -> Option<(OpenDevice, OpenDevice)> {
    let handles = async { (handle_to_read(source).await, handle_to_read(target).await) };
    first_of(handles, queue.exhausted()).await
}

async fn handle_to_read(stack: &Stack) -> OpenDevice {
    let first = stack.device();
    if !promises(stack) {
        return first.clone();
    }
    match blockhaul_io::timeout(DIAL_MAX, stack.another()).await {
        Ok(Ok(another)) if differs(stack, &another).is_none() => another,
        _ => first.clone(),
    }
}

/// Whether all handles of a stack are certain to show one disk.
fn promises(stack: &Stack) -> bool {
    !stack.has_more() || stack.device().facts().can.contains(Can::MULTI_CONN)
}
