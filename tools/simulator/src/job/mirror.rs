//! Mirrors.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blockhaul_io::simulation::note;
use blockhaul_io::sleep;
use blockhaul_jobs::{CopyMode, InitialCopy, JobTarget, MirrorCompletion, MirrorConfig};

use super::backup::target;
use super::world::JobWorld;

/// Time after which no request of a client without a reply is carried out any more.
const SETTLED: Duration = Duration::from_secs(60);
/// Copies of the disk that are kept, one for each flush of the target.
const MOMENTS: usize = 16;

/// The disk at the latest flushes of the target.
#[derive(Clone, Default)]
struct RecentFlushes(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl RecentFlushes {
    fn all(&self) -> MutexGuard<'_, VecDeque<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, bytes: Vec<u8>) {
        let mut all = self.all();
        all.push_back(bytes);
        if all.len() > MOMENTS {
            all.pop_front();
        }
    }

    fn have(&self, bytes: &[u8]) -> bool {
        self.all().iter().any(|moment| moment == bytes)
    }
}

impl JobWorld {
    /// A mirror of the whole disk, whose target has other contents before.
    pub(super) async fn mirror_of_all(&mut self) -> Result<bool, String> {
        self.new_shared_target(None).await?;
        Ok(self.mirror(InitialCopy::All).await?.is_some())
    }

    /// A mirror whose target is the disk already.
    pub(super) async fn mirror_of_nothing(&mut self) -> Result<bool, String> {
        self.tempo.quieten(true);
        self.tempo.idle().await;
        sleep(SETTLED).await;
        let contents = self.disk()?.live();
        self.new_shared_target(Some(contents)).await?;
        Ok(self.mirror(InitialCopy::Nothing).await?.is_some())
    }

    /// A mirror of what has changed since the backup on the target.
    pub(super) async fn mirror_of_changes(&mut self) -> Result<bool, String> {
        let Some(bitmap) = self.chain.clone().filter(|_| self.target_is_shared) else {
            return self.mirror_of_all().await;
        };
        self.bitmaps.take(&bitmap);
        let base = self.mirror(InitialCopy::Dirty(bitmap.clone())).await?;
        let completed = base.is_some();
        let base = base.map(|base| self.base(base));
        self.bitmaps.give_back(&bitmap, base);
        Ok(completed)
    }

    /// A target to which clients can move.
    async fn new_shared_target(&mut self, contents: Option<Vec<u8>>) -> Result<(), String> {
        loop {
            self.new_target(contents.clone()).await?;
            if self.target_is_shared {
                return Ok(());
            }
        }
    }

    /// A mirror: the disk of its last moment, if it has completed.
    async fn mirror(&mut self, initial: InitialCopy) -> Result<Option<Vec<u8>>, String> {
        let (worker, desk) = self.desk()?;
        let before = self.before(self.target_has_failed());
        let disk = self.disk()?;
        let moves = self.moves();
        let moments = RecentFlushes::default();
        let (seen, watched) = (moments.clone(), disk.clone());
        self.target.look().set(Some(Box::new(move || seen.add(watched.live()))));
        let modes = [CopyMode::Background, CopyMode::WriteBlocking];
        let options = self.copy_options();
        note(&format!("a mirror, first {initial:?}, with {options:?}"));
        let wanted = MirrorConfig {
            export: desk.export.clone(),
            target: JobTarget::Spec(target(&self.target.uri())?),
            options,
            within: Duration::from_secs(*self.rng.pick(&[1, 60])),
            initial,
            copy_mode: *self.rng.pick(&modes),
            settings: self.settings(),
            resumes: None,
        };
        let beginning =
            worker.spawn(move || async move { desk.jobs.mirror(&desk.table, wanted).await });
        let begun = self.begun(beginning).await?;
        self.tempo.quieten(false);
        let Some(job) = begun else { return Ok(None) };
        let within = Duration::from_secs(*self.rng.pick(&[1, 10]));
        let ending = MirrorCompletion { within, switch: self.rng.chance(50) };
        let ended = self.drive(&job, Some(ending), &before).await?;
        self.target.look().set(None);
        if !ended.completed {
            self.follow().await?;
            return Ok(None);
        }
        let moved = self.moves() > moves;
        if moved != ending.switch {
            return Err(format!("clients have moved: {moved}"));
        }
        // Clients have left the one or the other behind: that one does not change any more.
        let left = if moved { disk.live() } else { self.target.live() };
        if !moments.have(&left) {
            let report = job.report();
            return Err(format!("a mirror is not the disk of its last moment: {report:?}"));
        }
        if !moved && self.target.durable() != left {
            return Err("a mirror is not durable".to_string());
        }
        self.follow().await?;
        Ok(Some(left))
    }
}
