//! `pause`: holds requests on command, through the server's control socket or its own.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use blockhaul_block::{Device, Error, Facts, PendingRequest, Request, Result};
use blockhaul_catalog::{Layer, LayerKind, ParamKind, ParamValues};
use blockhaul_io::Completer;

use crate::declared::{param, param_or};

/// The layer `pause`.
pub static PAUSE: LayerKind = LayerKind {
    name: "pause",
    summary: "holds back new requests while it is paused",
    manual:
        "While `paused=on`, new requests wait. `blockhaul ctl SOCKET set EXPORT pause paused=on` \
returns when requests in flight are complete: from then on the device below does not change \
and can, for example, be copied. `paused=off` resumes.

`pause-control` is the path of another Unix socket, which the layer creates and listens on. \
The byte `p` pauses, and the reply is `P` when no request is in flight. `r` resumes, and the \
reply is `R`. The reply to other bytes is `X`. For example: `printf p | nc -U SOCKET`.",
    example: r#"
blockhaul serve --control disk.ctl -e disk --layer pause memory:64M \
  --run 'blockhaul ctl disk.ctl set disk pause paused=on && blockhaul ctl disk.ctl exports'
"#,
    needs_content: false,
    writes_below: true,
    transparent: true,
    params: &[
        param_or("paused", ParamKind::Switch, "off", "Hold back new requests."),
        param("pause-control", ParamKind::Text, "Path of another control socket."),
    ],
    changeable: &["paused"],
    configure: |args| configure(args),
};

fn configure(args: &ParamValues) -> Result<Arc<dyn Layer>> {
    let valve = Arc::new(Valve::default());
    if args.switch("paused") {
        valve.pause();
    }
    let path = args.text("pause-control").map(PathBuf::from);
    let socket = path.map(|path| listen_at(path, &valve)).transpose()?;
    Ok(Arc::new(PauseLayer { valve, socket }))
}

struct PauseLayer {
    valve: Arc<Valve>,
    socket: Option<Arc<PauseSocket>>,
}

impl Layer for PauseLayer {
    fn wrap(&self, inner: Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let valve = self.valve.clone();
        let socket = self.socket.clone();
        Ok(Arc::new(PauseDevice { inner, valve, _socket: socket }))
    }

    fn change(&self, args: &ParamValues) -> Result<()> {
        if args.switch("paused") {
            self.valve.pause();
        } else {
            self.valve.resume();
        }
        Ok(())
    }
}

/// Makes the layer's own control socket.
fn listen_at(path: PathBuf, valve: &Arc<Valve>) -> Result<Arc<PauseSocket>> {
    let cannot = |error| {
        Error::system(format!("pause: cannot listen on pause-control={}", path.display()), error)
    };
    let listener = UnixListener::bind(&path).map_err(cannot)?;
    let control = valve.clone();
    std::thread::Builder::new()
        .name("pause".into())
        .spawn(move || listen(&listener, &control))
        .map_err(cannot)?;
    // The layer's last owner removes the socket; the thread ends with the next connection.
    Ok(Arc::new(PauseSocket { path, valve: valve.clone() }))
}

/// The control socket in the file system.
struct PauseSocket {
    path: PathBuf,
    valve: Arc<Valve>,
}

impl Drop for PauseSocket {
    fn drop(&mut self) {
        self.valve.lock().over = true;
        self.valve.quiet.notify_all();
        // Wakes the listener, so that it ends.
        drop(UnixStream::connect(&self.path));
        // It may be gone already.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen(listener: &UnixListener, valve: &Arc<Valve>) {
    for connection in listener.incoming() {
        if valve.lock().over {
            return;
        }
        match connection {
            Ok(connection) => obey(connection, valve),
            // Out of descriptors: other connections may end.
            Err(_) => std::thread::sleep(std::time::Duration::from_millis(100)),
        }
    }
}

/// Carries out the commands of one control client, byte by byte.
fn obey(mut visitor: UnixStream, valve: &Valve) {
    let mut byte = [0];
    // A silent client must not block others for ever.
    let patience = Some(std::time::Duration::from_secs(60));
    if visitor.set_read_timeout(patience).is_err() {
        return;
    }
    while visitor.read_exact(&mut byte).is_ok() {
        let answer = match &byte {
            b"p" => {
                valve.pause();
                b"P"
            }
            b"r" => {
                valve.resume();
                b"R"
            }
            _ => b"X",
        };
        if visitor.write_all(answer).is_err() {
            return;
        }
    }
}

/// Lets requests pass, or holds them.
#[derive(Default)]
struct Valve {
    state: Mutex<ValveState>,
    quiet: Condvar,
}

#[derive(Default)]
struct ValveState {
    paused: bool,
    under_way: usize,
    waiting: Vec<Completer<Pass>>,
    over: bool,
}

impl Valve {
    fn lock(&self) -> MutexGuard<'_, ValveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Holds new requests and waits for those in flight.
    fn pause(&self) {
        let mut state = self.lock();
        state.paused = true;
        while state.under_way > 0 && state.paused && !state.over {
            state = self.quiet.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn resume(&self) {
        let waiting = {
            let mut state = self.lock();
            state.paused = false;
            std::mem::take(&mut state.waiting)
        };
        // Each of them tries again.
        drop(waiting);
        self.quiet.notify_all();
    }

    /// Permission for a request, or a wait.
    fn enter(valve: &Arc<Valve>) -> std::result::Result<Pass, blockhaul_io::Ticket<Pass>> {
        let mut state = valve.lock();
        if !state.paused {
            state.under_way += 1;
            return Ok(Pass(valve.clone()));
        }
        let (completer, ticket) = blockhaul_io::ticket();
        state.waiting.push(completer);
        Err(ticket)
    }
}

/// One request in flight.
struct Pass(Arc<Valve>);

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.under_way -= 1;
        if state.under_way == 0 {
            self.0.quiet.notify_all();
        }
    }
}

struct PauseDevice {
    inner: Arc<dyn Device>,
    valve: Arc<Valve>,
    _socket: Option<Arc<PauseSocket>>,
}

impl Device for PauseDevice {
    fn facts(&self) -> Arc<Facts> {
        self.inner.facts()
    }

    fn submit(&self, request: Request) -> PendingRequest {
        let entered = match Valve::enter(&self.valve) {
            Ok(pass) => {
                let pending = match self.inner.submit(request).now() {
                    Ok(outcome) => return PendingRequest::ready(outcome),
                    Err(pending) => pending,
                };
                return PendingRequest::start(async move {
                    let outcome = pending.await;
                    drop(pass);
                    outcome
                });
            }
            Err(ticket) => ticket,
        };
        let inner = self.inner.clone();
        let valve = self.valve.clone();
        PendingRequest::start(async move {
            let mut wait = entered;
            let pass = loop {
                // Woken by the end of the pause.
                let _ = wait.await;
                match Valve::enter(&valve) {
                    Ok(pass) => break pass,
                    Err(ticket) => wait = ticket,
                }
            };
            let outcome = inner.submit(request).await;
            drop(pass);
            outcome
        })
    }
}
