//! `--control`: the socket for managing a running server, with `blockhaul ctl`. One JSON object per
//! line, each answered with one; `docs/serve.md` documents them.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use blockhaul_block::{Can, OpKind};
use blockhaul_catalog::{Adjustable, Spec};
use blockhaul_io::{Listener, Remote, Stream};
use blockhaul_os::Identity;
use blockhaul_server::{Client, Counts, Disconnected, Server};
use blockhaul_snapshot::{OnFailure, Options, Trim};
use rustix::fs::Mode;
use serde_json::{Map, Value, json};

use super::exports::Table;
use super::figures;
use super::job_errors::OnError;
use super::job_state::Status;
use super::jobs::{Item, Job, Jobs, Settings, Source, To, WantedJobs, WantedMirror};
use super::listen::Cleanup;
use super::mirror::{self, CopyMode, Ending, First};
use super::notify::Notify;
use super::running::Running;
use super::snapshots::{Begin, GRANULARITY, NewBitmap};
use super::stop::{Stop, Stopper};
use super::tls::Secured;
use super::wanted::One;
use crate::aside::{self, Serving};
use crate::exit::{Failure, OPEN, USAGE, plain};
use crate::metrics::Figures;

/// Longer requests end the connection.
const REQUEST_MAX: usize = 64 << 10;
/// Maximum number of peers: a few users and programs.
const PEERS_MAX: usize = 16;
/// Time after which an idle peer is disconnected.
const IDLE: Duration = Duration::from_secs(60);
/// Maximum time for sending a reply.
const PATIENCE: Duration = Duration::from_secs(5);

/// Maximum time for requests in flight to end before layers are exchanged.
const BARRIER: Duration = Duration::from_secs(30);

/// A control socket that is not served yet.
pub struct Control {
    listener: Listener,
    path: PathBuf,
}

impl Control {
    /// Makes the socket, for this user only. Call it before there are other threads, whose files
    /// would get the same mode.
    ///
    /// `option` is the option that names it.
    pub fn bind(option: &str, path: &Path, cleanup: &Cleanup) -> Result<Control, Failure> {
        let cannot = |why: &str| {
            let text = format!("{option}: cannot listen on {}: {why}", path.display());
            Failure::new(OPEN, text)
        };
        // Absolute, because a background server leaves the current directory.
        let path = std::path::absolute(path).map_err(|error| cannot(&plain(&error)))?;
        let mode = rustix::process::umask(Mode::XUSR | Mode::RWXG | Mode::RWXO);
        let bound = Listener::replace_unix(&path);
        rustix::process::umask(mode);
        let listener = bound.map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => {
                cannot("another program listens there: choose another path, or end that program")
            }
            _ => cannot(&plain(&error)),
        })?;
        cleanup.remember_socket(&path);
        Ok(Control { listener, path })
    }

    /// Gives it to the user that the server will run as.
    pub fn give_to(&self, identity: &Identity) -> std::io::Result<()> {
        std::os::unix::fs::chown(&self.path, identity.uid(), Some(identity.gid()))
    }

    /// The socket itself.
    pub fn into_listener(self) -> Listener {
        self.listener
    }

    /// Serves it until the returned value is dropped.
    pub fn start(self, operations: &Arc<Operations>) -> Serving {
        let worker = &operations.worker;
        let operations = Arc::downgrade(operations);
        let attend = move |peer: Rc<Stream>| {
            let operations = operations.clone();
            async move { attend(&peer, &operations).await }
        };
        aside::serve(self.listener, worker, PEERS_MAX, attend)
    }
}

/// The operations of a running server.
pub struct Operations {
    pub server: Arc<Server>,
    pub table: Arc<Table>,
    pub stopper: Stopper,
    /// The worker that waits for clients to disconnect.
    pub worker: Remote,
    pub secured: Secured,
    pub notify: Notify,
    pub jobs: Arc<Jobs>,
}

/// The operations of a server, for code that runs before it.
#[derive(Clone, Default)]
pub struct Shared(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    /// Dangling before the server is ready, and after it has ended.
    operations: Weak<Operations>,
    /// Whether the keys may have changed since the server read them, before it was ready.
    reload_due: bool,
}

impl Shared {
    /// Called once, when the server is ready.
    pub fn set(&self, operations: &Arc<Operations>) {
        let mut known = self.lock();
        known.operations = Arc::downgrade(operations);
        let reload_due = std::mem::take(&mut known.reload_due);
        drop(known);
        if reload_due {
            // The result is in the log.
            let _ = operations.reload();
        }
    }

    /// Runs `work`, if the server is ready.
    pub fn with(&self, work: impl FnOnce(&Operations)) {
        let weak = self.lock().operations.clone();
        if let Some(operations) = weak.upgrade() {
            work(&operations);
        }
    }

    /// Reloads as [`Operations::reload`] does, as soon as the server is ready.
    pub fn reload(&self) {
        let mut known = self.lock();
        if let Some(operations) = known.operations.upgrade() {
            drop(known);
            // The result is in the log.
            let _ = operations.reload();
        } else {
            known.reload_due = true;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a request failed.
struct Refusal {
    kind: &'static str,
    text: String,
}

impl Refusal {
    /// The request is invalid.
    fn usage(text: impl Into<String>) -> Refusal {
        Refusal { kind: "usage", text: text.into() }
    }

    /// The operation failed.
    fn failed(text: impl Into<String>) -> Refusal {
        Refusal { kind: "failed", text: text.into() }
    }

    /// The same, for a change.
    fn of(failure: Failure) -> Refusal {
        let kind = if failure.status() == USAGE { "usage" } else { "failed" };
        Refusal { kind, text: failure.to_string() }
    }

    /// There is no object of that name or number.
    fn absent(text: impl Into<String>) -> Refusal {
        Refusal { kind: "absent", text: text.into() }
    }
}

/// Serves one peer, request by request.
async fn attend(peer: &Stream, operations: &Weak<Operations>) {
    let mut received = Vec::new();
    let mut heard = Instant::now();
    let mut waits = false;
    loop {
        if let Some(end) = received.iter().position(|&byte| byte == b'\n') {
            let rest = received.split_off(end + 1);
            let line = std::mem::replace(&mut received, rest);
            let Some(operations) = operations.upgrade() else { return };
            let answer = match ask(&line) {
                Ok((command, _)) if command == "wait" => {
                    waits = true;
                    continue;
                }
                Ok((command, request)) => operations.answer(command, request).await,
                Err(refusal) => Err(refusal),
            };
            if say(peer, answer).await.is_err() {
                return;
            }
            heard = Instant::now();
            continue;
        }
        if received.len() > REQUEST_MAX {
            return;
        }
        let receiving = aside::receive(peer, &mut received);
        let more = if waits {
            receiving.await
        } else {
            let left = IDLE.saturating_sub(heard.elapsed());
            let more = blockhaul_io::timeout(left, receiving).await;
            more.unwrap_or_else(|late| Err(std::io::Error::other(late)))
        };
        if !more.unwrap_or(false) {
            return;
        }
    }
}

/// A required member of a request.
fn text<'a>(
    command: &str,
    request: &'a Map<String, Value>,
    name: &str,
) -> Result<&'a str, Refusal> {
    let found = request.get(name).and_then(Value::as_str);
    found.ok_or_else(|| Refusal::usage(format!("{command}: {name:?} is missing or not a string")))
}

/// A member that may be missing.
fn optional_text(
    command: &str,
    request: &Map<String, Value>,
    name: &str,
) -> Result<Option<String>, Refusal> {
    match request.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => text(command, request, name).map(|text| Some(text.to_string())),
    }
}

/// A list of texts; empty if missing, `None` if it has another type.
fn texts(value: Option<&Value>) -> Option<Vec<String>> {
    let Some(value) = value else { return Some(Vec::new()) };
    value.as_array()?.iter().map(|text| text.as_str().map(String::from)).collect()
}

/// The command of a request, and the request.
fn ask(line: &[u8]) -> Result<(String, Map<String, Value>), Refusal> {
    let wrong = || Refusal::usage("a request is one JSON object per line, with a \"command\"");
    let Ok(Value::Object(request)) = serde_json::from_slice(line) else { return Err(wrong()) };
    let command = request.get("command").and_then(Value::as_str).ok_or_else(wrong)?;
    Ok((command.to_string(), request))
}

/// Reads a request, and what its members mean.
#[cfg(any(test, fuzzing))]
pub(crate) fn fuzz(line: &[u8]) {
    let Ok((command, request)) = ask(line) else { return };
    let _ = within(&command, &request);
    let _ = device_of(&command, &request, "device");
    let _ = snapshot_options(&command, &request);
    let _ = copy_mode(&command, &request);
    let _ = settings(&command, &request);
}

async fn say(peer: &Stream, answer: Result<Value, Refusal>) -> std::io::Result<()> {
    let mut value = match answer {
        Ok(value) => value,
        Err(Refusal { kind, text }) => json!({ "kind": kind, "error": text, "ok": false }),
    };
    if let Value::Object(members) = &mut value {
        members.entry("ok").or_insert(Value::Bool(true));
    }
    let text = format!("{value}\n");
    let sending = blockhaul_io::timeout(PATIENCE, peer.send_all(text.as_bytes()));
    sending.await.unwrap_or_else(|late| Err(std::io::Error::other(late)))
}

impl Operations {
    /// Carries out a request: here, so that the reply is sent before the operations that it starts
    /// continue; reading of files on a thread that may block.
    async fn answer(
        self: Arc<Self>,
        command: String,
        request: Map<String, Value>,
    ) -> Result<Value, Refusal> {
        match command.as_str() {
            "reload" => {}
            "export-add" => return self.add_export(&request).await,
            "export-remove" => return self.remove_export(&request).await,
            "layer-add" | "layer-remove" => return self.change_layers(&command, &request).await,
            "backup" => return self.begin_backup(&request).await,
            "job-resume" | "job-cancel" => return self.resume_or_cancel(&command, &request).await,
            "mirror" => return self.begin_mirror(&request).await,
            "snapshot-add" => return self.add_snapshot(&request).await,
            "job-wait" => return self.wait_for_job(&request).await,
            "bitmap-add" | "bitmap-remove" => return self.change_bitmaps(&command, &request).await,
            _ => return self.carry_out(&command, &request),
        }
        let carried_out = blockhaul_io::offload(move || self.carry_out(&command, &request)).await;
        carried_out.unwrap_or_else(|lost| Err(Refusal::failed(lost.to_string())))
    }

    fn carry_out(&self, command: &str, request: &Map<String, Value>) -> Result<Value, Refusal> {
        match command {
            "clients" => Ok(
                json!({ "clients": self.server.clients().iter().map(client).collect::<Vec<_>>() }),
            ),
            "exports" => Ok(json!({ "exports": self.exports() })),
            "disconnect" => self.disconnect(request),
            "drain" => Ok(self.drain()),
            "reload" => self.reload().map(|done| json!({ "done": done })).map_err(Refusal::failed),
            "metrics" => {
                let sums = self.server.sums();
                let storage = self.table.figures();
                Ok(json!({ "text": figures::write(Figures::default(), &sums, &storage) }))
            }
            "stop" => {
                log::info!("stopping on request of the control socket");
                let clients = self.server.open();
                self.stopper.stop(Stop::Asked);
                Ok(json!({ "clients": clients }))
            }
            "jobs" => {
                let all = self.jobs.all();
                Ok(json!({ "jobs": all.iter().map(|job| job.described()).collect::<Vec<_>>() }))
            }
            "job-pause" | "job-resume" | "job-cancel" | "job-rate" | "job-copy-mode"
            | "job-finalize" => self.control_job(command, request),
            "job-complete" => self.complete_job(request),
            "bitmap-clear" | "bitmap-enable" | "bitmap-disable" | "bitmap-merge" => {
                self.control_bitmap(command, request)
            }
            "set" => self.set(request),
            _ => Err(Refusal::usage(format!(
                "unknown command {command:?}; known are clients, exports, disconnect, set, export-add, \
                 export-remove, layer-add, layer-remove, snapshot-add, bitmap-add, bitmap-remove, bitmap-clear, \
                 bitmap-enable, bitmap-disable, bitmap-merge, backup, mirror, jobs, job-pause, job-resume, \
                 job-complete, job-finalize, job-cancel, job-rate, job-copy-mode, job-wait, reload, metrics, drain, stop, wait"
            ))),
        }
    }

    fn disconnect(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let number = request
            .get("number")
            .and_then(Value::as_u64)
            .ok_or_else(|| Refusal::usage("disconnect: \"number\" is missing or not an integer"))?;
        let ended = self.server.disconnect(number);
        if ended.is_some() {
            log::info!(connection = number; "connection {number}: disconnected on request");
        }
        match ended {
            Some(Disconnected::Requested) => Ok(json!({ "done": "told" })),
            Some(Disconnected::Cut) => Ok(json!({ "done": "cut" })),
            None => Err(Refusal::absent(format!("there is no client {number}"))),
        }
    }

    /// Accepts no more clients, and stops when the last one has left.
    fn drain(&self) -> Value {
        log::info!("draining on request of the control socket: no more clients are accepted");
        let clients = self.server.drain();
        let clients_are = if clients == 1 { "client is" } else { "clients are" };
        self.notify.status(&format!("draining: {clients} {clients_are} still connected"));
        let server = Arc::downgrade(&self.server);
        let stopper = self.stopper.clone();
        drop(self.worker.spawn(move || end_when_empty(server, stopper)));
        json!({ "clients": clients })
    }

    fn control_bitmap(
        &self,
        command: &str,
        request: &Map<String, Value>,
    ) -> Result<Value, Refusal> {
        let export = self.export(text(command, request, "export")?)?;
        let name = text(command, request, "name")?;
        let done = match command {
            "bitmap-merge" => {
                let wrong = || Refusal::usage("bitmap-merge: \"from\" is not a list of names");
                let from = texts(request.get("from")).filter(|from| !from.is_empty());
                export.merge_bitmaps(name, &from.ok_or_else(wrong)?).map_err(Refusal::of)?;
                "merged"
            }
            "bitmap-clear" => {
                export.bitmap(name).map_err(Refusal::of)?.clear();
                "cleared"
            }
            change => {
                export.bitmap(name).map_err(Refusal::of)?.enable(change == "bitmap-enable");
                change.trim_start_matches("bitmap-")
            }
        };
        Ok(json!({ "done": done }))
    }

    /// Changes a setting of a layer.
    fn set(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let text = |name: &str| text("set", request, name);
        let (layers, place) = self.layer(text("export")?, text("layer")?)?;
        let layer = &layers[place];
        let name = text("name")?;
        let value = text("value")?;
        layer.set(name, value).map_err(|error| Refusal::usage(error.text()))?;
        log::info!(layer = layer.name(); "layer {}: {name}={value}", layer.name());
        Ok(json!({ "layer": shown(layer) }))
    }

    /// Reloads the TLS files, for later clients. Returns what was done, or why nothing has changed.
    pub fn reload(&self) -> Result<&'static str, String> {
        if self.secured.is_off() {
            return Ok("nothing to reload: TLS is off");
        }
        self.notify.reloading();
        let read = match self.secured.open() {
            Ok(tls) => {
                self.server.set_tls(tls);
                log::info!("TLS: keys and certificates reloaded");
                Ok("keys and certificates reloaded")
            }
            Err(failure) => {
                let text = format!("{failure}; those from before stay in use");
                log::error!("{text}");
                Err(text)
            }
        };
        self.notify.ready(if read.is_ok() { "reloaded" } else { "reload failed; check the log" });
        read
    }

    /// Opens another export: `name`, `device` (a text, or the words of a command) and, if they
    /// differ from the defaults, `description`, `readonly` and `layers`.
    async fn add_export(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let name = text("export-add", request, "name")?;
        let wrong = |what| Refusal::usage(format!("export-add: {what}"));
        let description = match request.get("description") {
            None => "",
            Some(value) => {
                value.as_str().ok_or_else(|| wrong("\"description\" is not a string"))?
            }
        };
        let readonly = match request.get("readonly") {
            None => false,
            Some(value) => {
                value.as_bool().ok_or_else(|| wrong("\"readonly\" is not true or false"))?
            }
        };
        let layers = texts(request.get("layers"));
        let layers = layers.ok_or_else(|| wrong("\"layers\" is not a list of strings"))?;
        let spec = device_of("export-add", request, "device")?;
        let one = One::described(name, description, spec, readonly, layers);
        self.table.add(one).await.map_err(Refusal::of)?;
        log::info!(export = name; "added export {name:?}");
        Ok(json!({ "done": "added" }))
    }

    /// Removes an unused export; with `force` also one in use.
    async fn remove_export(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let name = text("export-remove", request, "name")?;
        let force = request.get("force").and_then(Value::as_bool).unwrap_or_default();
        let all = self.exports();
        let found = all.iter().find(|one| one["name"] == name);
        let found = found.ok_or_else(|| self.no_export(name))?;
        let clients = found["clients"].as_u64().unwrap_or_default();
        if clients > 0 && !force {
            let are = if clients == 1 { "client uses" } else { "clients use" };
            let text =
                format!("{clients} {are} export {name:?}: disconnect them first, or use --force");
            return Err(Refusal::failed(text));
        }
        if !self.table.remove(name).await {
            return Err(self.no_export(name));
        }
        log::info!(export = name; "removed export {name:?}");
        Ok(json!({ "done": "removed", "clients": clients }))
    }

    /// Adds `layer` to `export`, or removes it; `seconds` is the maximum time for requests in
    /// flight to end.
    async fn change_layers(
        &self,
        command: &str,
        request: &Map<String, Value>,
    ) -> Result<Value, Refusal> {
        let export = text(command, request, "export")?;
        let layer = text(command, request, "layer")?;
        let within = within(command, request)?;
        let found = self.export(export)?;
        if command == "layer-add" {
            self.table.add_layer(&found, layer, within).await.map_err(Refusal::of)?;
            log::info!(export = export; "added layer {layer} to export {export:?}");
        } else {
            let (_, place) = self.layer(export, layer)?;
            self.table.remove_layer(&found, place, within).await.map_err(Refusal::of)?;
            log::info!(export = export; "removed layer {layer} of export {export:?}");
        }
        let layers: Vec<_> = found.layers().iter().map(|layer| shown(layer)).collect();
        Ok(json!({ "layers": layers }))
    }

    /// Begins a backup of `export` to `target`, and of those in `with` at the same moment, with
    /// `options` of copy and of the snapshot.
    async fn begin_backup(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let mut disks = vec![self.disk(request)?];
        match request.get("with") {
            None => {}
            Some(Value::Array(others)) => {
                for other in others {
                    let wrong = || Refusal::usage("backup: \"with\" is not a list of objects");
                    disks.push(self.disk(other.as_object().ok_or_else(wrong)?)?);
                }
            }
            Some(_) => return Err(Refusal::usage("backup: \"with\" is not a list of objects")),
        }
        let options = texts(request.get("options"));
        let wrong = || Refusal::usage("backup: \"options\" is not a list of strings");
        let options = options.ok_or_else(wrong)?;
        let settings = settings("backup", request)?;
        let bitmap = optional_text("backup", request, "bitmap")?;
        let mut items = Vec::new();
        for (export, target) in disks {
            let begin = Begin {
                options: snapshot_options("backup", request)?,
                bitmap: bitmap.clone(),
                clears: true,
                start: optional_text("backup", request, "start_bitmap")?,
                trim: Trim::Releases,
                within: within("backup", request)?,
            };
            items.push(Item {
                export,
                target: To::Spec(target),
                options: options.clone(),
                source: Source::Now(begin),
                selects: bitmap.clone(),
                settings: settings.clone(),
                resumes: None,
            });
        }
        let wanted = WantedJobs { disks: items, grouped: true, at_once: Vec::new() };
        let jobs = self.jobs.backup(&self.table, wanted).await.map_err(Refusal::of)?;
        let described: Vec<_> = jobs.iter().map(|job| job.described()).collect();
        for job in &described {
            let shown = |name: &str| job[name].as_str().unwrap_or_default();
            log::info!(export = shown("export"); "job {}: backup of {:?} to {}", job["job"],
                shown("export"), shown("target"));
        }
        match &described[..] {
            [only] => Ok(only.clone()),
            _ => Ok(json!({ "jobs": described })),
        }
    }

    /// An export and the target of its backup.
    fn disk(&self, request: &Map<String, Value>) -> Result<(Arc<Running>, Spec), Refusal> {
        let export = self.export(text("backup", request, "export")?)?;
        Ok((export, device_of("backup", request, "target")?))
    }

    /// Begins a mirror of `export` to `target`, with `options` of copy.
    async fn begin_mirror(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let export = self.export(text("mirror", request, "export")?)?;
        let options = texts(request.get("options"));
        let wrong = || Refusal::usage("mirror: \"options\" is not a list of strings");
        let options = options.ok_or_else(wrong)?;
        let target = device_of("mirror", request, "target")?;
        let within = within("mirror", request)?;
        let first = match (optional_text("mirror", request, "bitmap")?, request.get("sync")) {
            (Some(bitmap), None) => First::Dirty(bitmap),
            (None, None) => First::All,
            (None, Some(Value::String(sync))) if sync == "full" => First::All,
            (None, Some(Value::String(sync))) if sync == "none" => First::Nothing,
            _ => {
                let text = "mirror: \"sync\" is full or none, without \"bitmap\"";
                return Err(Refusal::usage(text));
            }
        };
        let copy_mode = copy_mode("mirror", request)?.unwrap_or_default();
        let settings = settings("mirror", request)?;
        let export = export.clone();
        let target = To::Spec(target);
        let wanted = WantedMirror {
            export: export.clone(),
            target,
            options,
            within,
            first,
            copy_mode,
            settings,
            resumes: None,
        };
        let job = self.jobs.mirror(&self.table, wanted).await;
        let described = job.map_err(Refusal::of)?.described();
        log::info!(export = export.name; "job {}: mirror of {:?} to {}", described["job"], export.name,
            described["target"].as_str().unwrap_or_default());
        Ok(described)
    }

    /// Asks a mirror to complete; `seconds` is the time that clients may wait, and `switch` says
    /// whether they move to the target.
    fn complete_job(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let job = self.job("job-complete", request)?;
        let switch = match request.get("switch") {
            None | Some(Value::Bool(true)) => true,
            Some(Value::Bool(false)) => false,
            Some(_) => return Err(Refusal::usage("job-complete: \"switch\" is not true or false")),
        };
        let within = seconds("job-complete", request, "seconds")?.unwrap_or(mirror::WITHIN);
        if job.is_over() {
            return Err(Refusal::failed("the job has ended"));
        }
        if !job.complete(Ending { within, switch }) {
            return Err(Refusal::usage("job-complete: the job is not a mirror"));
        }
        Ok(job.described())
    }

    /// Serves a point in time of `export` as `name`.
    async fn add_snapshot(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let command = "snapshot-add";
        let export = self.export(text(command, request, "export")?)?;
        let name = text(command, request, "name")?;
        let options = snapshot_options(command, request)?;
        let within = within(command, request)?;
        let trim = match request.get("discard") {
            None | Some(Value::Bool(false)) => Trim::Refused,
            Some(Value::Bool(true)) => Trim::Releases,
            Some(_) => {
                let text = "snapshot-add: \"discard\" is not true or false";
                return Err(Refusal::usage(text));
            }
        };
        let bitmap = optional_text(command, request, "bitmap")?;
        let start = optional_text(command, request, "start_bitmap")?;
        let begin = Begin { options, bitmap, clears: false, start, trim, within };
        self.table.add_snapshot(export.clone(), name, &begin).await.map_err(Refusal::of)?;
        log::info!(export = name; "added snapshot {name:?} of export {:?}", export.name);
        Ok(json!({ "done": "added" }))
    }

    /// Adds the bitmap `name` to `export`, or removes it.
    async fn change_bitmaps(
        &self,
        command: &str,
        request: &Map<String, Value>,
    ) -> Result<Value, Refusal> {
        let export = self.export(text(command, request, "export")?)?;
        let name = text(command, request, "name")?;
        if command == "bitmap-remove" {
            self.table.remove_bitmap(&export, name).await.map_err(Refusal::of)?;
            return Ok(json!({ "done": "removed" }));
        }
        let granularity = match request.get("granularity") {
            None => GRANULARITY,
            Some(value) => value.as_u64().ok_or_else(|| {
                Refusal::usage("bitmap-add: \"granularity\" is not a number of bytes")
            })?,
        };
        let within = within(command, request)?;
        let bitmap = NewBitmap { name, granularity, kept: true };
        let added = self.table.add_bitmap(&export, bitmap, within).await;
        added.map_err(Refusal::of)?;
        Ok(json!({ "done": "added" }))
    }

    fn job(&self, command: &str, request: &Map<String, Value>) -> Result<Arc<Job>, Refusal> {
        let number = request.get("job").and_then(Value::as_u64).ok_or_else(|| {
            Refusal::usage(format!("{command}: \"job\" is missing or not an integer"))
        })?;
        let found = self.jobs.find(number);
        found.ok_or_else(|| Refusal::absent(format!("there is no job {number}")))
    }

    fn control_job(&self, command: &str, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let job = self.job(command, request)?;
        let copies = match command {
            "job-pause" => job.pause(true),
            "job-resume" => job.pause(false),
            "job-rate" => {
                let rate = request.get("rate").and_then(Value::as_u64);
                let wrong = || Refusal::usage("job-rate: \"rate\" is not a number of bytes");
                job.limit(rate.ok_or_else(wrong)?)
            }
            "job-copy-mode" => {
                let wanted = copy_mode(command, request)?;
                let missing = || Refusal::usage("job-copy-mode: \"copy_mode\" is missing");
                let mirror = job
                    .mirror()
                    .ok_or_else(|| Refusal::usage("job-copy-mode: the job is not a mirror"))?;
                mirror.set_copy_mode(wanted.ok_or_else(missing)?);
                !job.is_over()
            }
            "job-finalize" if job.status() == Status::Pending => {
                job.finalize();
                true
            }
            "job-finalize" => return Err(Refusal::failed("the job is not pending")),
            _ => {
                job.cancel();
                true
            }
        };
        if copies {
            Ok(job.described())
        } else {
            Err(Refusal::failed(
                "the job is not copying: it has ended, or clients wait for its end",
            ))
        }
    }

    /// The same for jobs of an earlier server, too: `new_moment` says that a backup may become the disk
    /// of now.
    async fn resume_or_cancel(
        &self,
        command: &str,
        request: &Map<String, Value>,
    ) -> Result<Value, Refusal> {
        let job = self.job(command, request)?;
        let new_moment = match request.get("new_moment") {
            None => false,
            Some(value) => value.as_bool().ok_or_else(|| {
                Refusal::usage(format!("{command}: \"new_moment\" is not true or false"))
            })?,
        };
        if job.resumable().is_none() {
            return self.control_job(command, request);
        }
        if command == "job-cancel" {
            if self.jobs.forget(&self.table, job.id()).await {
                return Ok(job.described());
            }
            return Err(Refusal::failed("the job was resumed or cancelled just now"));
        }
        let resumed = self.jobs.resume(&self.table, job.id(), new_moment).await;
        let resumed = resumed.map_err(Refusal::of)?;
        resumed.iter().for_each(|job| log::info!("job {}: resumed", job.id()));
        let same = resumed.iter().find(|one| one.id() == job.id());
        Ok(same.unwrap_or(&job).described())
    }

    /// Waits until a job has ended.
    async fn wait_for_job(&self, request: &Map<String, Value>) -> Result<Value, Refusal> {
        let job = self.job("job-wait", request)?;
        match request.get("ready") {
            Some(Value::Bool(true)) => job.ready().await,
            _ => job.over().await,
        }
        Ok(job.described())
    }

    fn no_export(&self, export: &str) -> Refusal {
        let running = self.table.running();
        let known: Vec<_> = running.iter().map(|one| format!("{:?}", one.name)).collect();
        let known = if known.is_empty() {
            "none is served".to_string()
        } else {
            format!("known are {}", known.join(", "))
        };
        Refusal::absent(format!("there is no export {export:?}; {known}"))
    }

    fn export(&self, name: &str) -> Result<Arc<Running>, Refusal> {
        let found = self.table.running().into_iter().find(|one| one.name == name);
        found.ok_or_else(|| self.no_export(name))
    }

    /// The layers of an export, and which of them has this name; `NAME:N` selects the nth of that
    /// name, counted from the storage.
    fn layer(&self, export: &str, layer: &str) -> Result<(Vec<Arc<Adjustable>>, usize), Refusal> {
        let layers = self.export(export)?.layers();
        let (name, place) = match layer.split_once(':') {
            Some((name, place)) => (name, place.parse::<usize>().ok()),
            None => (layer, None),
        };
        let named: Vec<_> = (0..layers.len()).filter(|&at| layers[at].name() == name).collect();
        match (&named[..], place) {
            (&[only], None) => Ok((layers, only)),
            (all, Some(place)) if (1..=all.len()).contains(&place) => Ok((layers, all[place - 1])),
            ([], _) => {
                let known: Vec<_> = layers.iter().map(|one| one.name()).collect();
                let known = if known.is_empty() {
                    "it has none".to_string()
                } else {
                    format!("known are {}", known.join(", "))
                };
                let text = format!("export {export:?} has no layer {name:?}; {known}");
                Err(Refusal::absent(text))
            }
            (all, _) => {
                let known: Vec<_> =
                    (1..=all.len()).map(|place| format!("{name}:{place}")).collect();
                let text = format!(
                    "export {export:?} has no layer {layer:?} alone; known are {}",
                    known.join(", ")
                );
                Err(Refusal::absent(text))
            }
        }
    }

    /// The exports, as `ctl exports` prints them.
    pub fn exports(&self) -> Vec<Value> {
        let sums = self.server.sums().exports;
        let running = self.table.running();
        let only = running.len() == 1;
        running
            .iter()
            .map(|one| {
                let below = |name: &str| {
                    let rest = name.strip_prefix(one.name.as_str());
                    rest.is_some_and(|rest| one.name.is_empty() || rest.starts_with('/'))
                };
                let its = |name: &String| only || *name == one.name || (!one.single && below(name));
                let clients: u64 =
                    sums.iter().filter(|(name, _)| its(name)).map(|(_, sum)| sum.clients).sum();
                let facts = one.device().map(|device| device.facts());
                json!({
                    "name": one.name,
                    "description": one.description,
                    "device": one.storage(),
                    "size": facts.as_ref().map(|facts| facts.size),
                    "served": one.served,
                    "readonly": facts.as_ref().map(|facts| !facts.can.contains(Can::WRITE)),
                    "clients": clients,
                    "state": one.own.as_ref().and_then(Weak::upgrade).and_then(|own| own.state()),
                    "bitmaps": bitmaps(one),
                    "layers": one.layers().iter().map(|layer| shown(layer)).collect::<Vec<_>>(),
                })
            })
            .collect()
    }
}

/// The maximum time for requests in flight to end: `seconds`.
fn within(command: &str, request: &Map<String, Value>) -> Result<Duration, Refusal> {
    Ok(seconds(command, request, "seconds")?.unwrap_or(BARRIER))
}

/// A time in seconds.
fn seconds(
    command: &str,
    request: &Map<String, Value>,
    name: &str,
) -> Result<Option<Duration>, Refusal> {
    let Some(value) = request.get(name) else { return Ok(None) };
    let time = value.as_f64().and_then(|time| Duration::try_from_secs_f64(time).ok());
    let wrong = || Refusal::usage(format!("{command}: {name:?} is not a time in seconds"));
    time.map(Some).ok_or_else(wrong)
}

/// A device: a text, or the words of a command.
fn device_of(command: &str, request: &Map<String, Value>, name: &str) -> Result<Spec, Refusal> {
    let wrong = |what| Refusal::usage(format!("{command}: {name:?} {what}"));
    let spec = match request.get(name) {
        Some(Value::String(device)) => Spec::parse(OsStr::new(device)),
        Some(words @ Value::Array(_)) => {
            let words = texts(Some(words)).filter(|words| !words.is_empty());
            let words = words.ok_or_else(|| wrong("is not a list of strings"))?;
            Ok(Spec::Command(words.into_iter().map(OsString::from).collect()))
        }
        _ => return Err(wrong("is missing, or neither a string nor a list of strings")),
    };
    match spec.map_err(|error| Refusal::usage(error.text()))? {
        Spec::Pipe => Err(wrong("cannot be the standard output of the server")),
        spec => Ok(spec),
    }
}

/// How a point in time is kept: the member `snapshot`, with `block`, `directory`, `max`,
/// `guest_timeout` (seconds) and `on_failure` (`break` or `fail`).
fn snapshot_options(command: &str, request: &Map<String, Value>) -> Result<Options, Refusal> {
    let mut options = Options::default();
    let given = match request.get("snapshot") {
        None => return Ok(options),
        Some(Value::Object(given)) => given,
        Some(_) => return Err(Refusal::usage(format!("{command}: \"snapshot\" is not an object"))),
    };
    let wrong =
        |name: &str| Refusal::usage(format!("{command}: \"snapshot\" has a wrong {name:?}"));
    for (name, value) in given {
        match (name.as_str(), value) {
            ("block", value) => options.block = value.as_u64().ok_or_else(|| wrong(name))?,
            ("max", value) => options.max = value.as_u64().ok_or_else(|| wrong(name))?,
            ("directory", Value::String(path)) => options.directory = Some(path.into()),
            ("guest_timeout", _) => {
                options.guest_timeout =
                    seconds(command, given, name)?.unwrap_or(options.guest_timeout);
            }
            ("on_failure", Value::String(what)) if what == "break" => {
                options.on_failure = OnFailure::BreakSnapshot;
            }
            ("on_failure", Value::String(what)) if what == "fail" => {
                options.on_failure = OnFailure::FailWrite;
            }
            (name, _) => return Err(wrong(name)),
        }
    }
    Ok(options)
}

/// When a mirror's target has what clients write; `None` if it is not given.
fn copy_mode(command: &str, request: &Map<String, Value>) -> Result<Option<CopyMode>, Refusal> {
    let Some(text) = optional_text(command, request, "copy_mode")? else { return Ok(None) };
    let mode = CopyMode::parse(&text).ok_or_else(|| {
        let all = CopyMode::NAMES.join(", ");
        Refusal::usage(format!("{command}: \"copy_mode\" is none of {all}"))
    });
    mode.map(Some)
}

/// How a job is controlled: `job_name`, `finalize_by_hand`, `on_source_error` and
/// `on_target_error`.
fn settings(command: &str, request: &Map<String, Value>) -> Result<Settings, Refusal> {
    let policy = |name: &str| match optional_text(command, request, name)? {
        None => Ok(OnError::Report),
        Some(text) => OnError::parse(&text).ok_or_else(|| {
            let all = OnError::NAMES.join(", ");
            Refusal::usage(format!("{command}: {name:?} is none of {all}"))
        }),
    };
    let finalized_by_hand = match request.get("finalize_by_hand") {
        None => false,
        Some(value) => value.as_bool().ok_or_else(|| {
            Refusal::usage(format!("{command}: \"finalize_by_hand\" is not true or false"))
        })?,
    };
    Ok(Settings {
        name: None,
        finalized_by_hand,
        on_source_error: policy("on_source_error")?,
        on_target_error: policy("on_target_error")?,
        ..Settings::default()
    })
}

/// Ends the server when its last client has disconnected. Does not keep its exports open.
async fn end_when_empty(server: Weak<Server>, stopper: Stopper) {
    while let Some(server) = server.upgrade() {
        let changed = server.changed();
        if server.open() == 0 {
            return stopper.stop(Stop::Asked);
        }
        drop(server);
        // Lost when the server has ended, which is detected above.
        let _ = changed.await;
    }
}

/// The bitmaps of an export; those that are inconsistent have a reason instead of a state.
fn bitmaps(export: &Running) -> Vec<Value> {
    let sound = export.bitmaps().clone();
    let inconsistent = export.inconsistent().clone();
    let sound = sound.iter().map(|bitmap| {
        json!({
            "name": bitmap.name(),
            "granularity": bitmap.granularity(),
            "enabled": bitmap.is_enabled(),
            "dirty": bitmap.dirty_bytes(),
        })
    });
    let inconsistent =
        inconsistent.iter().map(|(name, why)| json!({ "name": name, "inconsistent": why }));
    sound.chain(inconsistent).collect()
}

fn shown(layer: &Adjustable) -> Value {
    let options: BTreeMap<_, _> = layer.values().into_iter().collect();
    json!({ "name": layer.name(), "options": options, "changeable": layer.changeable() })
}

/// A client, as `ctl clients` prints it.
pub fn client(client: &Client) -> Value {
    let Counts { requests, bytes, errors, in_flight, .. } = client.counts;
    let named = |counts: [u64; OpKind::ALL.len()]| {
        let all = OpKind::ALL.into_iter().zip(counts);
        all.map(|(kind, count)| (kind.name().to_string(), json!(count))).collect::<Map<_, _>>()
    };
    let tls = client.identity.as_ref();
    json!({
        "number": client.number,
        "address": client.address,
        "export": client.export,
        "tls": tls.map(|tls| json!({ "version": tls.version, "name": tls.name })),
        "in_flight": in_flight,
        "requests": named(requests),
        "bytes": named(bytes),
        "errors": errors,
        "age": client.age.as_secs_f64(),
        "leaving": client.leaving,
    })
}
