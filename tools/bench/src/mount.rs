//! File systems for the runs: an image file, a loop device with direct I/O, a mount. They need root.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::plan::{BenchPaths, MountPlan, PlanStep, ScenarioPlan};
use crate::process::ProcessContext;
use crate::progress::RunProgress;
use blockhaul_measure::MeasureError;

/// Making a file system takes seconds at most.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where a file system is mounted.
pub fn folder(places: &BenchPaths, name: &str) -> PathBuf {
    places.disk.join(format!("mount-{name}"))
}

/// Why a file system of this type cannot be made here; None if it may be tried.
pub fn unmet(kind: &str, places: &BenchPaths) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some(format!("needs root to mount {kind}"));
    }
    let programs = [format!("mkfs.{kind}"), "losetup".into(), "mount".into(), "umount".into()];
    let missing = programs.iter().find(|program| places.find(program).is_none())?;
    Some(format!("the program {missing} is not there"))
}

/// File systems that are mounted until this is dropped.
pub struct MountGuard<'a> {
    ground: &'a ProcessContext<'a>,
    /// Folder and loop device.
    made: Vec<(PathBuf, Option<String>)>,
}

impl<'a> MountGuard<'a> {
    /// Mounts what the plan needs. What cannot be mounted takes its cells out of the plan, with the
    /// reason.
    pub fn make(
        plan: &mut ScenarioPlan,
        ground: &'a ProcessContext<'a>,
        progress: &mut RunProgress,
    ) -> MountGuard<'a> {
        let mut mounts = MountGuard { ground, made: Vec::new() };
        for mount in std::mem::take(&mut plan.mounts) {
            progress.note(&format!("mounting {}", mount.kind));
            match mounts.add(&mount) {
                Ok(()) => plan.mounts.push(mount),
                Err(why) => without(plan, &mount, &why.to_string()),
            }
        }
        mounts
    }

    fn add(&mut self, mount: &MountPlan) -> crate::Result<()> {
        let path = |path: &Path| path.display().to_string();
        std::fs::create_dir(&mount.folder)
            .map_err(|error| MeasureError::file("make", &mount.folder, error))?;
        crate::files::fresh(&mount.image, mount.size)?;
        self.run(&[&format!("mkfs.{}", mount.kind), "-q", &path(&mount.image)])?;
        let find = ["losetup", "--find", "--show", "--direct-io=on", &path(&mount.image)];
        let device = self.run(&find)?.trim().to_owned();
        self.made.push((mount.folder.clone(), Some(device.clone())));
        self.run(&["mount", "-t", &mount.kind, &device, &path(&mount.folder)])?;
        Ok(())
    }

    fn run(&self, words: &[&str]) -> crate::Result<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let timed = self.ground.run(&words, TIMEOUT);
        match timed.failure {
            None => Ok(self.ground.output()),
            Some(failure) => {
                let said = failure.stderr.lines().last().unwrap_or_default().to_owned();
                Err(MeasureError::new(format!("{}: {said}", failure.why)))
            }
        }
    }
}

impl Drop for MountGuard<'_> {
    fn drop(&mut self) {
        // After Ctrl-C, too: these must be run although everything is to stop.
        let stop = std::sync::atomic::AtomicBool::new(false);
        let ground = ProcessContext { stop: &stop, ..*self.ground };
        for (folder, device) in self.made.drain(..).rev() {
            let folder = folder.display().to_string();
            let mut steps = vec![vec!["umount".to_owned(), folder]];
            steps.extend(device.map(|device| vec!["losetup".into(), "--detach".into(), device]));
            for words in steps {
                ground.run(&words, TIMEOUT);
            }
        }
    }
}

/// Takes the cells that need a file system out of a plan.
fn without(plan: &mut ScenarioPlan, mount: &MountPlan, why: &str) {
    for cell in &mut plan.cells {
        if cell.as_ref().is_ok_and(|body| body.mounts.contains(&mount.name)) {
            *cell = Err(format!("{} cannot be mounted here: {why}", mount.kind));
        }
    }
    plan.images.retain(|image| !image.path.starts_with(&mount.folder));
    let folder = mount.folder.display().to_string();
    plan.setup.retain(|act| match act {
        PlanStep::Run(words) => !words.iter().any(|word| word.contains(&folder)),
        PlanStep::Fresh(path, _) | PlanStep::Remove(path) | PlanStep::Evict(path) => {
            !path.starts_with(&folder)
        }
        PlanStep::Overwrite(path, like) | PlanStep::Compare(path, like) => {
            !path.starts_with(&folder) && !like.starts_with(&folder)
        }
    });
}
