//! `blockhaul ctl`: manages a running server through its control socket (`serve::control`).

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use blockhaul_control::{ControlRequest, Refusal, RefusalKind};
use blockhaul_jobs::{clients_table, exports_table, jobs_table};
use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::{self, CtlCommand};
use crate::exit::{CommandFailure, CommandResult, FAILED, LOST, OPEN, USAGE, plain};
use crate::{logger, out};

/// Maximum reply: ten thousand clients need a few MiB.
const ANSWER_MAX: u64 = 256 << 20;

/// Runs `blockhaul ctl`.
pub fn run(args: &args::Ctl) -> CommandResult {
    let mut server = ControlConnection::open(&args.socket, args.timeout)?;
    server.verbose = args.verbose;
    let json = args.json;
    if let &CtlCommand::JobWait { job, ready } = &args.command {
        return wait_for_job(&mut server, job, ready, json);
    }
    let mut reply = Value::Null;
    for request in args.command.requests()? {
        reply = server.ask(&request)?;
        for warning in reply["warnings"].as_array().into_iter().flatten().filter_map(message) {
            logger::warn(&warning);
        }
    }
    match &args.command {
        CtlCommand::Clients => tell_list(&reply, json, "clients", clients_table),
        CtlCommand::Exports => tell_list(&reply, json, "exports", exports_table),
        CtlCommand::Jobs => tell(&reply, json, jobs_table),
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
            tell(&answer, json, |answer| result(answer, server.verbose))?;
            Ok(status.unwrap_or(FAILED))
        }
    }
}

/// The result of a job: one sentence, and with `verbose` its counters.
fn result(answer: &Value, verbose: bool) -> String {
    let members = if verbose { &["summary", "result"][..] } else { &["summary"] };
    members.iter().filter_map(|member| message(&answer[member])).map(|line| line + "\n").collect()
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
    /// Results of jobs are shown with their counters.
    verbose: bool,
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
        Ok(ControlConnection { path, stream: BufReader::new(stream), verbose: false })
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

/// A sentence of the server, on one line; names in it are quoted already.
fn message(value: &Value) -> Option<String> {
    value.as_str().map(out::one_line)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}
