//! Rounds of a mirror: what has changed is copied again, and the target is flushed.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhaul_block::{Can, Device, DeviceExt as _, Error, Kind, Result};
use blockhaul_control::CopyMode;
use blockhaul_engine::{CopyError, CopySummary, Engine, EngineControl};
use blockhaul_snapshot::PersistentDirtyMap;

use super::{CLIENT_WAIT, Mirror, MirrorCompletion};

/// Time between rounds while a mirror is ready: changes are collected.
pub(super) const PACE: Duration = Duration::from_millis(100);
/// Interval of flushes while a mirror is ready, so that the last one is short.
const FLUSH_EVERY: Duration = Duration::from_secs(1);
/// Interval at which the map of a job that outlives the server is brought up to date while it is ready.
const SETTLE_EVERY: Duration = Duration::from_secs(10);
/// Rounds of fewer bytes say nothing about the rate.
const TELLING: u64 = 1 << 20;
/// Bytes that are copied at a time while clients' writes go to the target, too: those that overlap
/// wait for it.
const PIECE: u64 = 1 << 20;
/// Bytes that are copied at a time with a limited rate: one request, which need not wait for the tokens of another one.
const LIMITED_PIECE: u64 = 64 << 10;
/// Time that a client's write waits for a piece that is not copied: a request of it fails and is
/// repeated, or the target is that slow.
const PATIENCE: Duration = Duration::from_millis(200);

impl Mirror {
    /// Rounds, until the rest can be copied in time.
    pub(super) async fn catch_up(
        &self,
        engine: &mut Engine,
        also: &Arc<dyn Device>,
    ) -> Result<(), CopyError> {
        loop {
            self.apply_copy_mode(also).await;
            let dirty = self.take();
            if dirty.is_empty() {
                return Ok(());
            }
            self.round(engine, &dirty).await?;
            let within = self.lock().completion.map_or(CLIENT_WAIT, |completion| completion.within);
            if self.predicted() <= within {
                return Ok(());
            }
        }
    }

    /// The changes, for a round.
    fn take(&self) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        let dirty = self.changes.take();
        state.left = dirty.iter().map(|(_, len)| len).sum();
        dirty
    }

    /// Copies ranges again.
    pub(super) async fn round(
        &self,
        engine: &mut Engine,
        dirty: &[(u64, u64)],
    ) -> Result<(), CopyError> {
        if self.changes.writes_also() {
            for &(from, len) in dirty {
                let end = from.saturating_add(len);
                let mut at = from;
                while at < end {
                    let copied_to = self.copy_piece(engine, (at, end)).await?;
                    let mut state = self.lock();
                    state.left = state.left.saturating_sub(copied_to - at);
                    at = copied_to;
                }
            }
        } else {
            self.copy(engine, dirty).await?;
        }
        let mut state = self.lock();
        state.left = 0;
        state.rounds += 1;
        Ok(())
    }

    /// Copies the first piece of a range, and returns its end. Clients' writes to the piece wait for
    /// its read and write, but not while the job waits: for its rate, for the end of a pause, or
    /// after an error. What they write then is copied again.
    async fn copy_piece(
        &self,
        engine: &mut Engine,
        (at, end): (u64, u64),
    ) -> Result<u64, CopyError> {
        let control = engine.control();
        control.may_start().await;
        let is_limited = control.rate_limits() != (0, 0);
        let most = if is_limited { LIMITED_PIECE } else { PIECE };
        let len = most.min(end - at);
        let mut piece = self.changes.lock(at, len).await;
        let ranges = [(at, len)];
        let mut copying = pin!(self.copy(engine, &ranges));
        let until = blockhaul_io::now() + PATIENCE;
        let failures = self.lock().failures;
        let overdue = self.overdue(&control, until, failures);
        let copied = match before(copying.as_mut(), overdue).await {
            Some(copied) => copied,
            None => {
                piece.open();
                copying.await
            }
        };
        copied.map(|()| at + len)
    }

    /// Returns at this time, or once the job is paused, or has more than so many failures: then it waits
    /// before it repeats a request.
    async fn overdue(&self, control: &EngineControl, until: Instant, failures: u64) {
        loop {
            let changed = self.changes.listen();
            let left = until.saturating_duration_since(blockhaul_io::now());
            if control.is_paused() || self.lock().failures != failures || left.is_zero() {
                return;
            }
            let _ = blockhaul_io::timeout(left, changed).await;
        }
    }

    async fn copy(&self, engine: &mut Engine, ranges: &[(u64, u64)]) -> Result<(), CopyError> {
        let plan = engine.empty_plan();
        for &(at, len) in ranges {
            plan.add(at, len)?;
        }
        plan.close();
        let copied = engine.run(&plan).await?;
        self.note_rate(&copied);
        self.note_rewrites(engine);
        Ok(())
    }

    /// After an error the engine writes again what no flush has covered, without locks: that may
    /// have overwritten what clients have written to both meanwhile.
    fn note_rewrites(&self, engine: &Engine) {
        let rewritten = engine.summary().retried.rewritten;
        let before = std::mem::replace(&mut self.lock().rewritten, rewritten);
        if rewritten > before && self.changes.writes_also() {
            self.changes.give_back(&[(0, u64::MAX)]);
        }
    }

    /// Flushes the target: the first time, and when the latest flush was a while ago.
    pub(super) async fn flush(
        &self,
        engine: &mut Engine,
        also: &Arc<dyn Device>,
    ) -> Result<(), CopyError> {
        let due = self.lock().flushed.is_none_or(|at| blockhaul_io::elapsed(at) > FLUSH_EVERY);
        if due {
            let started = blockhaul_io::now();
            let settles = self.must_settle(also);
            if let Some(map) = settles {
                map.cut();
            }
            flush_all(engine, also).await?;
            self.note_rewrites(engine);
            if let Some(map) = settles {
                map.settle(&self.changes.ranges());
                self.lock().settled = Some(blockhaul_io::now());
            }
            let mut state = self.lock();
            state.flush = blockhaul_io::elapsed(started);
            state.flushed = Some(blockhaul_io::now());
        }
        Ok(())
    }

    /// The map, if the next flush brings it up to date. Not each one: a client waits at its first write
    /// to a block that does not differ.
    fn must_settle(&self, target: &Arc<dyn Device>) -> Option<&PersistentDirtyMap> {
        let due = self.lock().settled.is_none_or(|at| blockhaul_io::elapsed(at) > SETTLE_EVERY);
        let is_sure = target.facts().can.contains(Can::FLUSH | Can::MULTI_CONN);
        self.record.as_ref().map(|(_, map)| map).filter(|_| due && is_sure)
    }

    /// Waits until there is something to do: changes (`None`), or the end.
    pub(super) async fn wait(&self, control: &EngineControl) -> Result<Option<MirrorCompletion>> {
        loop {
            let changed = self.changes.listen();
            if self.progress.is_cancelled() {
                return Err(Error::new(Kind::ShuttingDown, "cancelled").complete());
            }
            if !control.is_paused() {
                let (completion, copy_mode) = {
                    let state = self.lock();
                    (state.completion, state.copy_mode)
                };
                if completion.is_some() {
                    return Ok(completion);
                }
                if self.changes.writes_also() != (copy_mode == CopyMode::WriteBlocking) {
                    return Ok(None);
                }
                if self.changes.bytes() > 0 {
                    // A request to complete need not wait for the next round.
                    let _ = blockhaul_io::timeout(PACE, changed).await;
                    return Ok(None);
                }
            }
            // This side keeps the sender.
            let _ = changed.await;
        }
    }

    /// Copies the rest, and makes it durable. It begins while no request is in flight.
    pub(super) async fn last_round(
        &self,
        engine: &mut Engine,
        also: &Arc<dyn Device>,
    ) -> Result<(), CopyError> {
        let dirty = self.take();
        let copied = async {
            self.round(engine, &dirty).await?;
            flush_all(engine, also).await?;
            self.note_rewrites(engine);
            Ok(())
        };
        copied.await.inspect_err(|_| {
            self.lock().left = 0;
            self.changes.give_back(&dirty);
        })
    }

    /// Time that clients would wait now.
    pub(super) fn predicted(&self) -> Duration {
        let bytes = self.changed_bytes();
        let state = self.lock();
        let copying = match state.rate {
            Some(rate) if rate > 0.0 => bytes as f64 / rate,
            _ => 0.0,
        };
        state.flush + Duration::try_from_secs_f64(copying).unwrap_or(Duration::MAX / 2)
    }

    pub(super) fn note_rate(&self, round: &CopySummary) {
        let bytes = round.data.saturating_add(round.zeroed);
        let seconds = round.elapsed.as_secs_f64();
        if bytes >= TELLING && seconds > 0.0 {
            self.lock().rate = Some(bytes as f64 / seconds);
        }
    }

    /// Lets clients' writes go to the target, too, or not.
    pub(super) async fn apply_copy_mode(&self, target: &Arc<dyn Device>) {
        let also = match self.lock().copy_mode {
            CopyMode::Background => None,
            CopyMode::WriteBlocking => Some(target.clone()),
        };
        let is_background = also.is_none();
        self.changes.write_also(also);
        if is_background {
            self.changes.settle().await;
        }
    }

    /// Number of bytes that have changed and are not copied yet.
    pub(crate) fn changed_bytes(&self) -> u64 {
        let state = self.lock();
        self.changes.bytes().saturating_add(state.left)
    }
}

/// The output of a future, unless `end` completes first: then the future can be continued.
pub(super) async fn before<T>(
    mut future: Pin<&mut impl Future<Output = T>>,
    end: impl Future<Output = ()>,
) -> Option<T> {
    let mut end = pin!(end);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// Flushes what the engine has written, and what clients have.
async fn flush_all(engine: &mut Engine, also: &Arc<dyn Device>) -> Result<(), CopyError> {
    engine.flush().await?;
    if also.facts().can.contains(Can::FLUSH) {
        also.flush().await.map_err(CopyError::at_target)?;
    }
    Ok(())
}
