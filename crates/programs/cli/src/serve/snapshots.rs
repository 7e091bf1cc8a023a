//! Points in time of exports in use.

use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use blockhaul_block::{Can, Device, Error, Kind, fence};
use blockhaul_catalog::{Barrier, Named, Stack, guarded};
use blockhaul_snapshot::{Options, Snapshot};

use super::exports::{Running, Table};
use crate::exit::Failure;

/// An export that shows a point in time of another one.
pub struct SnapshotOf {
    /// The export in use.
    pub live: Arc<Running>,
    /// Its point in time.
    pub snapshot: Snapshot,
}

impl Table {
    /// Begins a point in time of an export: at a moment when none of its requests is in flight.
    pub async fn begin_snapshot(
        &self,
        export: &Running,
        options: &Options,
        time: Duration,
    ) -> Result<(Snapshot, Arc<dyn Device>), Failure> {
        let _change = self.change().await;
        let (shared, stack) = self.changeable(export)?;
        let old = shared.switch().device();
        if !old.facts().can.contains(Can::WRITE) {
            let text = format!(
                "export {:?} is read-only: it does not change, copy it as it is",
                export.name
            );
            return Err(Failure::usage(text));
        }
        let snapshot = Snapshot::new(old.facts().size, options)?;
        export.snapshots().push(snapshot.clone());
        let exchanged = async {
            let new = self.top(export, &stack).await?;
            // What its writers have written is in the point in time, flushed or not.
            shared.switch().swap(new, Barrier::Within(time), async || Ok(())).await?;
            snapshot.view().ok_or_else(|| Failure::from(Error::misfit()))
        };
        match exchanged.await {
            Ok(view) => Ok((snapshot, fence(view))),
            Err(failure) => {
                snapshot.end();
                export.snapshots().pop();
                Err(failure)
            }
        }
    }

    /// Ends a point in time. Writes in flight are finished as they began.
    pub async fn end_snapshot(&self, export: &Running, snapshot: &Snapshot) {
        let _change = self.change().await;
        snapshot.end();
        export.snapshots().retain(|other| !other.is_same(snapshot));
        let Ok((shared, stack)) = self.changeable(export) else { return };
        let exchanged = async {
            let new = self.top(export, &stack).await?;
            shared.switch().swap(new, Barrier::None, async || Ok(())).await?;
            Ok::<_, Failure>(())
        };
        // It stays in the path of the requests, and does nothing there.
        if let Err(failure) = exchanged.await {
            log::debug!("the layer of an ended snapshot stays: {failure}");
        }
    }

    /// The device for clients: a stack with the points in time of its export over it.
    pub async fn top(&self, export: &Running, stack: &Stack) -> Result<Arc<dyn Device>, Failure> {
        let mut device = self.wanted().served(stack, export.write)?;
        let snapshots = export.snapshots().clone();
        for snapshot in snapshots {
            device = Stack::over(device).with_layer(snapshot.layer()).await?.device().clone();
        }
        Ok(device)
    }

    /// Begins a point in time and serves it as another export, read-only.
    pub async fn add_snapshot(
        &self,
        live: Arc<Running>,
        name: &str,
        options: &Options,
        time: Duration,
    ) -> Result<(), Failure> {
        self.check_new(name)?;
        let (snapshot, view) = self.begin_snapshot(&live, options, time).await?;
        let added = self.serve_snapshot(live.clone(), name, snapshot.clone(), view).await;
        if added.is_err() {
            self.end_snapshot(&live, &snapshot).await;
        }
        added
    }

    async fn serve_snapshot(
        &self,
        live: Arc<Running>,
        name: &str,
        snapshot: Snapshot,
        view: Arc<dyn Device>,
    ) -> Result<(), Failure> {
        let _change = self.change().await;
        self.check_new(name)?;
        let description = format!("snapshot of {}", live.storage);
        let shared = blockhaul_catalog::Shared::new(name, &description, view);
        let running = Running {
            name: name.to_string(),
            description: description.clone(),
            storage: description.clone(),
            write: false,
            single: true,
            own: None,
            shared: Some(shared.clone()),
            stack: std::sync::Mutex::default(),
            layers: std::sync::Mutex::default(),
            snapshots: std::sync::Mutex::default(),
            snapshot_of: Some(SnapshotOf { live, snapshot }),
        };
        let gates = self.common_gates();
        let storage = Named {
            name: name.to_string(),
            description,
            exports: guarded(shared, &gates)?,
            single: true,
        };
        self.serve(storage, running)
    }
}

impl Running {
    /// Its points in time, the first innermost.
    pub fn snapshots(&self) -> MutexGuard<'_, Vec<Snapshot>> {
        self.snapshots.lock().expect("no panic under this lock")
    }
}

/// The error of a job or a view whose export was removed.
pub fn removed() -> Error {
    Error::new(Kind::ShuttingDown, "the export was removed from the server")
}
