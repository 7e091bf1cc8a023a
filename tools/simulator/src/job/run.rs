//! One job after another.

use std::time::Duration;

use blockhaul_io::simulation::note;
use blockhaul_jobs::NewBitmap;

use super::world::JobWorld;
use crate::ScenarioSetup;

/// Attempts at a job that nothing prevents any more: clients may not be able to wait for it.
const ATTEMPTS: u32 = 20;

/// Requests of clients in quick succession, for each job: one of these.
const QUICK: &[u64] = &[20, 60, 150];

pub(crate) async fn run(setting: ScenarioSetup) -> Result<(), String> {
    let mut world = JobWorld::new(setting)?;
    world.set_calm(false);
    world.start().await?;
    world.start_target().await?;
    let working = world.begin_work()?;
    for _ in 0..*world.rng.pick(&[1, 1, 2, 3]) {
        world.job().await?;
        world.check_bitmaps()?;
        world.tempo.quieten(false);
    }
    world.become_calm().await?;
    let mut attempts = 0;
    while !world.job().await? {
        attempts += 1;
        if attempts > ATTEMPTS {
            return Err("no job succeeds although nothing goes wrong".to_string());
        }
    }
    world.check_bitmaps()?;
    world.end_work(working).await?;
    world.end().await
}

impl JobWorld {
    /// Some job; whether it has succeeded.
    async fn job(&mut self) -> Result<bool, String> {
        self.tempo.hurry(*self.rng.pick(QUICK));
        if self.rng.chance(30) {
            self.add_bitmap().await?;
        }
        let has_chain = self.chain.is_some();
        match self.rng.below(12) {
            0..=2 => self.full_backup().await,
            3..=5 if has_chain => self.increment().await,
            3..=5 => self.full_backup().await,
            6 if has_chain => self.mirror_of_changes().await,
            7 => self.mirror_of_nothing().await,
            8 => self.fleece().await.map(|()| false),
            _ => self.mirror_of_all().await,
        }
    }

    /// A bitmap that begins by itself, at a moment when clients wait.
    async fn add_bitmap(&mut self) -> Result<(), String> {
        let (worker, desk) = self.desk()?;
        self.begun += 1;
        let name = format!("b{}", self.begun);
        let granularity = 512 << self.rng.below(8);
        let kept = self.rng.chance(70);
        let there = name.clone();
        let before = self.starts;
        let added = worker.spawn(move || async move {
            let wanted = NewBitmap { name: &there, granularity, kept };
            desk.table.add_bitmap(&desk.export, wanted, Duration::from_secs(60)).await
        });
        // It may have ended with its server since.
        if self.begun(added).await?.is_some() && self.starts == before {
            note(&format!("bitmap {name} begins"));
            // Later: what was written meanwhile is dirty as well.
            let base = self.base(self.disk()?.live());
            self.bitmaps.add(&name, base, kept, false);
        }
        Ok(())
    }
}
