//! `blockhaul ctl`: manages a running server through its control socket (`serve::control`).

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhaul_control::{
    BitmapStatus, ClientStatus, ControlRequest, ExportStatus, LayerStatus, Refusal, RefusalKind,
};
use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::{self, CtlCommand};
use crate::exit::{CommandFailure, CommandResult, FAILED, LOST, OPEN, USAGE, plain};
use crate::out;

/// Maximum reply: ten thousand clients need a few MiB.
const ANSWER_MAX: u64 = 256 << 20;

/// Runs `blockhaul ctl`.
pub fn run(args: &args::Ctl) -> CommandResult {
    let mut server = ControlConnection::open(&args.socket, args.timeout)?;
    let json = args.json;
    if let &CtlCommand::JobWait { job, ready } = &args.command {
        return wait_for_job(&mut server, job, ready, json);
    }
    let mut reply = Value::Null;
    for request in args.command.requests()? {
        reply = server.ask(&request)?;
        for warning in reply["warnings"].as_array().into_iter().flatten().filter_map(message) {
            out::error(&format!("blockhaul: warning: {warning}\n"));
        }
    }
    match &args.command {
        CtlCommand::Clients => tell_list(&reply, json, "clients", clients),
        CtlCommand::Exports => tell_list(&reply, json, "exports", exports),
        CtlCommand::Jobs => tell(&reply, json, jobs),
        CtlCommand::Disconnect { number } => {
            tell(&reply, json, |reply| match reply["done"].as_str() {
                Some("cut") => format!("client {number} is disconnected\n"),
                _ => {
                    format!("client {number} will be disconnected when its requests are answered\n")
                }
            })
        }
        CtlCommand::Reload => {
            tell(&reply, json, |reply| message(&reply["done"]).unwrap_or_default() + "\n")
        }
        // The server's own lines; names in them are escaped.
        CtlCommand::Metrics => {
            tell(&reply, json, |reply| reply["text"].as_str().unwrap_or_default().to_string())
        }
        CtlCommand::Drain { wait } => {
            tell(&reply, json, |reply| {
                let there = match number(&reply["clients"]) {
                    0 => "no client is connected".to_string(),
                    1 => "1 client is connected".to_string(),
                    more => format!("{more} clients are connected"),
                };
                format!("no more clients are accepted; {there}\n")
            })?;
            server.wait(*wait)
        }
        CtlCommand::Stop { wait } => {
            tell(&reply, json, |_| String::new())?;
            server.wait(*wait)
        }
        CtlCommand::Backup { wait, .. } => {
            let jobs = match reply["jobs"].as_array() {
                None => vec![number(&reply["job"])],
                Some(jobs) => jobs.iter().map(|job| number(&job["job"])).collect(),
            };
            if *wait {
                return wait_for_jobs(&mut server, &jobs, json);
            }
            tell(&reply, json, |_| {
                jobs.iter().map(|job| format!("job {job} has begun\n")).collect()
            })
        }
        CtlCommand::Mirror { wait: true, .. } => {
            wait_for_job(&mut server, number(&reply["job"]), true, json)
        }
        CtlCommand::Mirror { .. } => {
            tell(&reply, json, |reply| format!("job {} has begun\n", reply["job"]))
        }
        CtlCommand::JobComplete { job, wait: true, .. } => {
            wait_for_job(&mut server, *job, false, json)
        }
        _ => tell(&reply, json, |_| String::new()),
    }
}

/// Waits until a job has ended, or is `ready`; the status is that of the job, 0 while it runs.
fn wait_for_job(
    server: &mut ControlConnection<'_>,
    job: u64,
    ready: bool,
    json: bool,
) -> CommandResult {
    server.wait_long()?;
    let answer = server.ask(&ControlRequest::JobWait { job, ready })?;
    if ready && answer["exit_status"].is_null() {
        return tell(&answer, json, |_| format!("job {job} is ready\n"));
    }
    let status = answer["exit_status"].as_u64().and_then(|status| u8::try_from(status).ok());
    match (status, message(&answer["error"])) {
        (Some(status), Some(error)) if !json => Err(CommandFailure::new(status, error)),
        (status, _) => {
            tell(&answer, json, |answer| message(&answer["result"]).unwrap_or_default() + "\n")?;
            Ok(status.unwrap_or(FAILED))
        }
    }
}

/// Waits until several jobs have ended; the status is the first that is not 0.
fn wait_for_jobs(server: &mut ControlConnection<'_>, jobs: &[u64], json: bool) -> CommandResult {
    let mut outcome = Ok(0);
    for job in jobs {
        let ended = wait_for_job(server, *job, false, json);
        if matches!(outcome, Ok(0)) {
            outcome = ended;
        }
    }
    outcome
}

/// Prints a reply: as JSON, or as text.
fn tell(answer: &Value, json: bool, text: impl Fn(&Value) -> String) -> CommandResult {
    let text = if json { format!("{answer}\n") } else { text(answer) };
    out::print(text.as_bytes())?;
    Ok(0)
}

/// Prints a reply with a list: as JSON, or as a table.
fn tell_list<T: DeserializeOwned>(
    answer: &Value,
    json: bool,
    name: &str,
    table: impl Fn(&[T]) -> String,
) -> CommandResult {
    if json {
        return tell(answer, json, |_| String::new());
    }
    let list = Vec::deserialize(&answer[name]).map_err(|error| {
        let text = format!(
            "the server is of another version ({name}: {error}): use its version of ctl, or --json"
        );
        CommandFailure::new(LOST, text)
    })?;
    tell(answer, json, |_| table(&list))
}

/// A connection to a control socket.
struct ControlConnection<'a> {
    path: &'a Path,
    stream: BufReader<UnixStream>,
}

impl<'a> ControlConnection<'a> {
    fn open(path: &'a Path, timeout: Duration) -> Result<ControlConnection<'a>, CommandFailure> {
        let cannot = |error: std::io::Error| {
            let next = match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
                    ": start the server with --control and this path"
                }
                ErrorKind::PermissionDenied => ": run this as the user that runs the server",
                _ => "",
            };
            let path = path.display();
            CommandFailure::new(
                OPEN,
                format!("cannot connect to a server at {path}: {}{next}", plain(&error)),
            )
        };
        let stream = UnixStream::connect(path).map_err(cannot)?;
        let patience = (!timeout.is_zero()).then_some(timeout);
        stream.set_read_timeout(patience).map_err(cannot)?;
        stream.set_write_timeout(patience).map_err(cannot)?;
        Ok(ControlConnection { path, stream: BufReader::new(stream) })
    }

    /// The reply to a request.
    fn ask(&mut self, request: &ControlRequest) -> Result<Value, CommandFailure> {
        let lost = |why: &str| {
            let text = format!("no reply from the server at {}: {why}", self.path.display());
            CommandFailure::new(LOST, text)
        };
        let io = |error: std::io::Error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => lost(
                "timeout; the server may still do it: see ctl exports and ctl jobs; use a longer --timeout, \
                     or check the messages of the server",
            ),
            _ => lost(&plain(&error)),
        };
        self.send(request).map_err(io)?;
        let mut line = Vec::new();
        self.stream.by_ref().take(ANSWER_MAX).read_until(b'\n', &mut line).map_err(io)?;
        if !line.ends_with(b"\n") {
            return Err(lost("it has closed the connection; check its messages"));
        }
        let answer: Value = serde_json::from_slice(&line)
            .map_err(|_| lost("the reply is not JSON: is this the control socket of a server?"))?;
        if answer["ok"] == Value::Bool(true) {
            return Ok(answer);
        }
        let refusal = Refusal::deserialize(answer);
        let refusal = refusal.unwrap_or_else(|_| Refusal::failed("the server refused the command"));
        let status = match refusal.kind {
            RefusalKind::Usage => USAGE,
            RefusalKind::Absent => OPEN,
            RefusalKind::Failed => FAILED,
        };
        Err(CommandFailure::new(status, refusal.error))
    }

    fn send(&mut self, request: &ControlRequest) -> std::io::Result<()> {
        let line = serde_json::to_string(request)? + "\n";
        self.stream.get_mut().write_all(line.as_bytes())
    }

    /// The next reply may take any time.
    fn wait_long(&mut self) -> Result<(), CommandFailure> {
        let set = self.stream.get_mut().set_read_timeout(None);
        set.map_err(|error| CommandFailure::new(LOST, plain(&error)))
    }

    /// Waits until the server has ended, if requested.
    fn wait(mut self, wanted: bool) -> CommandResult {
        if !wanted {
            return Ok(0);
        }
        let lost = |error: std::io::Error| {
            let text = format!("cannot wait for the end of the server: {}", plain(&error));
            CommandFailure::new(LOST, text)
        };
        self.stream.get_mut().set_read_timeout(None).map_err(lost)?;
        let asked = self.send(&ControlRequest::Wait);
        let ended = |error: &std::io::Error| {
            matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
        };
        match asked.and_then(|()| self.stream.read(&mut [0]).map(drop)) {
            Err(error) if !ended(&error) => Err(lost(error)),
            _ => Ok(0),
        }
    }
}

fn clients(clients: &[ClientStatus]) -> String {
    let mut rows = vec![
        ["CLIENT", "ADDRESS", "EXPORT", "TLS", "IN FLIGHT", "READ", "WRITTEN", "REQUESTS", "AGE"]
            .map(String::from)
            .to_vec(),
    ];
    for client in clients {
        let tls = match &client.tls {
            None => "-".to_string(),
            Some(tls) => tls.name.as_deref().map_or("anybody".to_string(), safe),
        };
        let export = match &client.export {
            None => "(handshake)".to_string(),
            Some(name) => shown(name),
        };
        let leaving = if client.leaving { " (leaving)" } else { "" };
        let bytes = |kind: &str| size(client.bytes.get(kind).copied().unwrap_or_default());
        rows.push(vec![
            client.number.to_string(),
            safe(&client.address),
            export + leaving,
            tls,
            client.in_flight.to_string(),
            bytes("read"),
            bytes("write"),
            client.requests.values().sum::<u64>().to_string(),
            age(client.age),
        ]);
    }
    table(&rows)
}

fn exports(exports: &[ExportStatus]) -> String {
    let header = ["EXPORT", "SIZE", "MODE", "CLIENTS", "DEVICE", "LAYERS", "BITMAPS"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for export in exports {
        let device = safe(&export.device);
        rows.push(vec![
            shown(&export.name),
            export.size.map_or("-".into(), size),
            export.readonly.map_or("-", |readonly| if readonly { "ro" } else { "rw" }).into(),
            export.clients.to_string(),
            match &export.state {
                None => device,
                Some(state) => format!("{device} ({})", safe(state)),
            },
            joined(export.layers.iter().map(layer)),
            joined(export.bitmaps.iter().map(bitmap)),
        ]);
    }
    table(&rows)
}

/// A layer with its parameters.
fn layer(layer: &LayerStatus) -> String {
    let options = layer.options.iter().map(|(name, value)| format!("{name}={}", safe(value)));
    let options: Vec<_> = options.collect();
    let name = safe(&layer.name);
    if options.is_empty() { name } else { format!("{name}?{}", options.join("&")) }
}

/// A bitmap and how much is dirty in it.
fn bitmap(bitmap: &BitmapStatus) -> String {
    match bitmap {
        BitmapStatus::Inconsistent { name, inconsistent } => {
            format!("{} (inconsistent: {})", safe(name), out::one_line(inconsistent))
        }
        BitmapStatus::Consistent { name, dirty, .. } => {
            format!("{} ({})", safe(name), size(*dirty))
        }
    }
}

/// The cells of a list; `-` if it is empty.
fn joined(cells: impl Iterator<Item = String>) -> String {
    let cells: Vec<_> = cells.collect();
    if cells.is_empty() { "-".into() } else { cells.join(" ") }
}

fn jobs(answer: &Value) -> String {
    let header =
        ["JOB", "TYPE", "EXPORT", "TARGET", "STATE", "DONE", "TOTAL", "SAVED", "DIRTY", "AGE"];
    let mut rows = vec![header.map(String::from).to_vec()];
    for job in answer["jobs"].as_array().into_iter().flatten() {
        rows.push(vec![
            number(&job["job"]).to_string(),
            text(&job["type"]),
            shown(job["export"].as_str().unwrap_or_default()),
            text(&job["target"]),
            match message(&job["error"]) {
                None => text(&job["state"]),
                Some(error) => format!("{}: {error}", text(&job["state"])),
            },
            size(number(&job["done"])),
            size(number(&job["total"])),
            size(number(&job["saved"])),
            size(number(&job["dirty"])),
            age(job["seconds"].as_f64().unwrap_or_default()),
        ]);
    }
    table(&rows)
}

/// A text that is safe for a terminal: names from servers and clients are escaped.
fn safe(text: &str) -> String {
    blockhaul_wire::printable(text.as_bytes(), 4096).to_string()
}

/// The name of an export.
fn shown(name: &str) -> String {
    if name.is_empty() { "\"\"".to_string() } else { safe(name) }
}

/// A text in a value, safe for a terminal.
fn text(value: &Value) -> String {
    value.as_str().map(safe).unwrap_or_default()
}

/// A sentence of the server, on one line; names in it are quoted already.
fn message(value: &Value) -> Option<String> {
    value.as_str().map(out::one_line)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// Rows with columns below each other.
fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            // Writing to a string does not fail.
            let _ = write!(line, "{cell:width$}  ");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Bytes in three digits.
fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["", "K", "M", "G", "T", "P"] {
        if value < 1000.0 || unit == "P" {
            let digits = usize::from(value < 9.95 && !unit.is_empty());
            return format!("{value:.digits$}{unit}");
        }
        value /= 1024.0;
    }
    bytes.to_string()
}

/// A time in its two largest units.
fn age(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..=59 => format!("{seconds:.1}s"),
        60..=3599 => format!("{}m{:02}s", whole / 60, whole % 60),
        3600..=86399 => format!("{}h{:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d{:02}h", whole / 86400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (bytes, shown) in
            [(0, "0"), (999, "999"), (1000, "1.0K"), (10 << 10, "10K"), (5 << 40, "5.0T")]
        {
            assert_eq!(size(bytes), shown);
        }
        for (seconds, shown) in
            [(0.25, "0.2s"), (61.0, "1m01s"), (3660.0, "1h01m"), (90000.0, "1d01h")]
        {
            assert_eq!(age(seconds), shown);
        }
    }

    #[test]
    fn what_peers_call_themselves_is_not_obeyed() {
        let client = ClientStatus {
            export: Some("\u{1b}[2J".to_string()),
            bytes: [("read".to_string(), 4096)].into(),
            ..ClientStatus::default()
        };
        let text = clients(&[client]);
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.contains("4.0K"), "{text}");
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}
