//! Mirror jobs: how they begin, and their tasks.

use std::sync::Arc;

use blockhaul_catalog::Stack;
use blockhaul_io::Pool;

use crate::error::JobError;
use crate::export::OpenExport;
use crate::export_table::ExportTable;
use crate::job::{Job, JobStart, JobWork};
use crate::job_config::{JobTarget, MirrorConfig};
use crate::job_copy::{copy, with_source_policy};
use crate::jobs::Jobs;
use crate::mirror::{InitialCopy, Mirror, MirrorSetup};

impl Jobs {
    /// Begins a mirror. On a worker; returns when changes of the disk are noted, and all that can be
    /// refused without the target was refused.
    ///
    /// # Errors
    /// If options or the description are invalid, the target is in use, or changes of the disk cannot be
    /// noted. A target that cannot be opened makes the job fail.
    pub async fn mirror(
        self: &Arc<Self>,
        table: &Arc<ExportTable>,
        config: MirrorConfig,
    ) -> Result<Arc<Job>, JobError> {
        if config.options.iter().any(|option| option.name == "verify") {
            return Err(JobError::request("mirror: --verify cannot be used here"));
        }
        let mut copy =
            copy(table, "mirror", &config.export, &config.target, &config.options, None)?;
        let writing = config.target.begin().await?;
        let record = self.mirror_record(table, &config).await?;
        let MirrorConfig { export, target, within, initial, copy_mode, settings, resumes, .. } =
            config;
        let is_resumed = resumes.is_some();
        if initial != InitialCopy::All || resumes.is_some_and(|record| record.has_target()) {
            copy.keep_target();
        }
        let start = JobStart::new(&export, &target, writing, settings, record);
        let setup = MirrorSetup {
            target: start.target.clone(),
            progress: copy.control().progress().clone(),
            within,
            initial,
            copy_mode,
            errors_wait: start.errors.watches_target(),
            is_to_node: matches!(target, JobTarget::Open(..)),
            target_owner: copy.owner(),
            record: start.record.clone(),
            is_resumed,
        };
        let (mirror, source) = begin_mirror(table, &export, setup).await?;
        copy.follow(with_source_policy(&start.errors, source).await?, mirror.clone());
        let job = self.begin(start, JobWork::Mirror(mirror.clone()), &mut copy);
        let running = job.clone();
        let watched = job.clone();
        let followed = mirror.clone();
        drop(blockhaul_io::spawn(async move {
            followed.ready(|| watched.is_over()).await;
            if followed.is_ready() {
                watched.has_become_ready();
            }
        }));
        drop(blockhaul_io::spawn(async move {
            let pool = Pool::new(copy.memory());
            let result = match copy.open().await {
                Ok(copy) => copy.run(pool).await,
                Err(error) => Err(error),
            };
            let result = result.map_err(JobError::from);
            mirror.give_up(result.is_ok(), running.is_interrupted()).await;
            running.end(result, None);
        }));
        Ok(job)
    }
}

/// Begins to note what clients write, and makes the job outlive the server.
async fn begin_mirror(
    table: &Arc<ExportTable>,
    export: &Arc<OpenExport>,
    setup: MirrorSetup,
) -> Result<(Arc<Mirror>, Stack), JobError> {
    let fresh = setup.record.clone().filter(|_| !setup.is_resumed);
    let begun = Mirror::begin(table, export, setup).await;
    match (begun, fresh) {
        (Ok(begun), None) => Ok(begun),
        (Ok(begun), Some(record)) => match record.persist().await {
            Ok(()) => Ok(begun),
            Err(failure) => {
                begun.0.give_up(false, false).await;
                Err(failure)
            }
        },
        (Err(failure), fresh) => {
            let remove = move || fresh.iter().for_each(|record| record.remove());
            let _ = blockhaul_io::offload(remove).await;
            Err(failure)
        }
    }
}
