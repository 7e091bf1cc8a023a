//! Lanes beyond the first: dialled while the others copy, and used only when they see the same disks.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhaul_block::{Can, Contexts, Device, Error, Flags, Request, Result};
use blockhaul_catalog::Stack;

use crate::handle::{DIAL_MAX, differs, is_lost};
use crate::job::Job;
use crate::options::MultiConn;

/// Dials a lane, makes sure that it sees the same disks, then has it work like the first. What is in
/// the way of it is a warning: the copy goes on without.
///
/// Lane number `index` is made when so many are found to pay.
pub(crate) async fn extra_lane(job: Arc<Job>, index: usize, source: Stack, target: Stack) {
    let wanted = job.slots.wait_for_places(index, || job.stopped());
    if futures_or(wanted, job.plan.exhausted()).await.is_none() || job.stopped() {
        return;
    }
    match prepare(&job, &source, &target).await {
        Ok(Some((from, to))) => job.lane((&source, from), (&target, to), false).run().await,
        Ok(None) => {}
        Err(why) => {
            let first = job.tuner.no_more_lanes();
            let text = format!("going on with fewer connections: {why}");
            // One says it all, whatever each of them failed of.
            match first && index < job.resolved.connections {
                true => job.warn(text),
                // One more than usual was only tried.
                false => log::info!("{text}"),
            }
        }
    }
}

type Handle = Arc<dyn Device>;

/// Further handles; `None` where all work is done before they can be used, and why they cannot be.
async fn prepare(
    job: &Arc<Job>,
    source: &Stack,
    target: &Stack,
) -> Result<Option<(Handle, Handle)>, String> {
    let multi_conn = job.resolved.multi_conn;
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
    // The others may have done all the work before the connection stands.
    let dialled = futures_or(blockhaul_io::timeout(DIAL_MAX, dial), job.plan.exhausted()).await;
    let (from, to) = match dialled {
        None => return Ok(None),
        Some(Ok(Ok(handles))) => handles,
        Some(Ok(Err(error))) => return Err(error.to_string()),
        Some(Err(blockhaul_io::Elapsed)) => {
            return Err(format!("no handshake within {} s", DIAL_MAX.as_secs()));
        }
    };
    let first = target.device();
    let tells_zeroes = first.facts().can.contains(Can::EXTENTS);
    if target.has_more() && tells_zeroes && !job.retries.lost_target() {
        // The zeroes that the target has reported so far count for a later connection only if both are of
        // the same run of the server: then the first one still lives. The target is not read, which its
        // promise may have spared it.
        let least = u64::from(first.facts().block.minimum.max(1));
        let question = Request::extents(0, least, Contexts::first()).with(Flags::ONE_EXTENT);
        let alive = first.submit(question).await;
        if alive.is_err_and(|error| is_lost(&error)) {
            job.retries.lose_target();
        }
    }
    if let Some(why) = differs(source, &from).or_else(|| differs(target, &to)) {
        return Err(why);
    }
    let unsure = |stack: &Stack, handle: &Handle| (!promises(stack)).then(|| handle.clone());
    let (from_unsure, to_unsure) = (unsure(source, &from), unsure(target, &to));
    let examined = to_unsure.is_some();
    if multi_conn == MultiConn::Auto && (from_unsure.is_some() || examined) {
        match job.same_disk.examine(from_unsure, to_unsure, &job.plan).await {
            Ok(()) => {}
            Err(None) => return Ok(None),
            Err(Some(why)) => return Err(why),
        }
    }
    if examined {
        job.one_disk.store(true, Ordering::Relaxed);
    }
    Ok(Some((from, to)))
}

/// Whether all handles of a stack are sure to show one disk.
fn promises(stack: &Stack) -> bool {
    !stack.has_more() || stack.device().facts().can.contains(Can::MULTI_CONN)
}

/// The first future's output, or `None` when the second ends before it.
async fn futures_or<T>(
    first: impl Future<Output = T>,
    second: impl Future<Output = ()>,
) -> Option<T> {
    let mut first = std::pin::pin!(first);
    let mut second = std::pin::pin!(second);
    std::future::poll_fn(|cx| {
        if let std::task::Poll::Ready(output) = first.as_mut().poll(cx) {
            return std::task::Poll::Ready(Some(output));
        }
        second.as_mut().poll(cx).map(|()| None)
    })
    .await
}
