//! A client of the monitor protocol: its greeting, commands and answers.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use blockhaul_io::{Listener, Stream, WorkerHandle};
use blockhaul_metrics::peer_listener::{self, PeerListener};
use serde_json::{Map, Value, json};

use crate::commands::{self, Arguments, COMMANDS};
use crate::error::{QmpError, Result};
use crate::events::LineQueue;
use crate::input::{InputBuffer, InputError};
use crate::monitor::Monitor;
use crate::query::greeting;

/// Maximum number of clients of a listener.
const PEERS_MAX: usize = 16;
/// Maximum time for sending.
const PATIENCE: Duration = Duration::from_secs(30);

impl Monitor {
    /// Serves at most 16 clients of a listener at a time, in tasks of `worker`, until the returned value is
    /// dropped. Connected clients stay until they leave, or until the monitor stops.
    pub fn serve(self: &Arc<Self>, listener: Listener, worker: &WorkerHandle) -> PeerListener {
        let monitor = Arc::downgrade(self);
        let attend = move |peer: Rc<Stream>| attend(peer, monitor.clone());
        peer_listener::serve(listener, worker, PEERS_MAX, attend)
    }

    /// Serves a client that is connected, in a task of `worker`. A descriptor that is no socket is closed.
    pub fn serve_connection(self: &Arc<Self>, socket: OwnedFd, worker: &WorkerHandle) {
        let monitor = Arc::downgrade(self);
        drop(worker.spawn(move || async move {
            if let Ok(stream) = Stream::new(socket) {
                attend(Rc::new(stream), monitor).await;
            }
        }));
    }
}

/// Serves one client. Answers and events are sent by a task of their own, in their order.
async fn attend(peer: Rc<Stream>, monitor: Weak<Monitor>) {
    let queue = Arc::new(LineQueue::default());
    match monitor.upgrade() {
        Some(monitor) => monitor.queues.add(&queue),
        None => return,
    }
    queue.push(&greeting());
    let sender = blockhaul_io::start(send_all(peer.clone(), queue.clone()));
    let mut input = InputBuffer::default();
    loop {
        while let Some(next) = input.next() {
            let answer = match next {
                Ok(value) => answer(&value, &queue, &monitor).await,
                Err(InputError::Json(text)) => reply(Err(QmpError::generic(text)), None),
                Err(InputError::TooLong) => {
                    queue.close();
                    return sender.await;
                }
            };
            queue.push(&answer);
        }
        let received = peer_listener::receive(&peer, input.buffer()).await;
        if queue.is_lost() || !received.unwrap_or(false) {
            break;
        }
    }
    queue.close();
    sender.await;
}

async fn send_all(peer: Rc<Stream>, queue: Arc<LineQueue>) {
    loop {
        let changed = queue.listen();
        let Ok(text) = queue.take() else { break };
        if text.is_empty() {
            // This side keeps the sender.
            let _ = changed.await;
            continue;
        }
        let sent = blockhaul_io::timeout(PATIENCE, peer.send_all(text.as_bytes())).await;
        if !matches!(sent, Ok(Ok(()))) {
            break;
        }
    }
    // The reader ends, too.
    peer.shutdown();
}

/// The answer to one input.
async fn answer(value: &Value, queue: &LineQueue, monitor: &Weak<Monitor>) -> Value {
    let Some(request) = value.as_object() else {
        return reply(Err(QmpError::generic("QMP input must be a JSON object")), None);
    };
    let done = match parsed(request) {
        Ok((name, arguments)) => execute(name, arguments, queue, monitor).await,
        Err(error) => Err(error),
    };
    reply(done, request.get("id"))
}

async fn execute(
    name: &str,
    arguments: &Arguments,
    queue: &LineQueue,
    monitor: &Weak<Monitor>,
) -> Result<Value> {
    match (name, queue.has_agreed()) {
        ("qmp_capabilities", false) => {
            agree(arguments)?;
            queue.agree();
            Ok(json!({}))
        }
        ("qmp_capabilities", true) => Err(QmpError::no_command(
            "Capabilities negotiation is already complete, command ignored",
        )),
        (_, false) => {
            let text = "Expecting capabilities negotiation with 'qmp_capabilities'";
            Err(QmpError::no_command(text))
        }
        (_, true) => match monitor.upgrade() {
            Some(monitor) => monitor.execute(name, arguments).await,
            None => Err(QmpError::generic("the server stops")),
        },
    }
}

/// Checks the arguments of `qmp_capabilities`: none is offered.
fn agree(arguments: &Arguments) -> Result<()> {
    if let Some(command) = commands::find(COMMANDS, "qmp_capabilities") {
        commands::check(command, arguments)?;
    }
    let enabled = arguments.get("enable").and_then(Value::as_array);
    match enabled.and_then(|enabled| enabled.first()) {
        None => Ok(()),
        Some(name) => {
            let name = name.as_str().unwrap_or_default();
            Err(QmpError::generic(format!("Capability {name} not available")))
        }
    }
}

/// The command and its arguments.
fn parsed(request: &Map<String, Value>) -> Result<(&str, &Arguments)> {
    static NONE: std::sync::LazyLock<Arguments> = std::sync::LazyLock::new(Arguments::new);
    let wrong = |text: &str| Err(QmpError::generic(text));
    if let Some(name) =
        request.keys().find(|name| !["execute", "arguments", "id"].contains(&name.as_str()))
    {
        let shown = blockhaul_wire::printable(name.as_bytes(), 64);
        return wrong(&format!("QMP input member '{shown}' is unexpected"));
    }
    let name = match request.get("execute") {
        None => return wrong("QMP input lacks member 'execute'"),
        Some(Value::String(name)) => name,
        Some(_) => return wrong("QMP input member 'execute' must be a string"),
    };
    match request.get("arguments") {
        None => Ok((name, &NONE)),
        Some(Value::Object(arguments)) => Ok((name, arguments)),
        Some(_) => wrong("QMP input member 'arguments' must be an object"),
    }
}

fn reply(done: Result<Value>, id: Option<&Value>) -> Value {
    let mut reply = match done {
        Ok(value) => json!({ "return": value }),
        Err(error) => json!({ "error": error.value() }),
    };
    if let Some(id) = id {
        reply["id"] = id.clone();
    }
    reply
}
