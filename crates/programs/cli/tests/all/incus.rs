//! What the pages say about volumes of Incus and LXD, carried out: a small server answers their HTTP requests,
//! and passes on to QEMU's storage daemon what follows an upgrade to NBD.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, text};
use serde_json::{Value, json};

use crate::backups::Qmp;
use crate::served_disk::{LIMIT, OURS, succeed};
use crate::tls_relay::{self, Clients};

const BACKUPS: &str = include_str!("../../../../../docs/backups.md");
const INCREMENTS: &str = include_str!("../../../../../docs/increments.md");
const VOLUME: &str = "/1.0/storage-pools/POOL/volumes/custom/NAME";
const SNAPSHOT: &str = "/1.0/instances/vm1/snapshots/monday/nbd";

/// The server, with a running machine whose disk is a volume.
struct Platform {
    daemon: Child,
    shared: Arc<Shared>,
    http: PathBuf,
    scratch: ScratchDir,
}

struct Shared {
    state: Mutex<State>,
    nbd: PathBuf,
    /// How many connections there may be at a time, each of another moment.
    most: usize,
}

struct State {
    qmp: Qmp,
    bitmaps: Vec<String>,
    open: usize,
    /// Requests, a line each.
    seen: Vec<String>,
}

impl Platform {
    /// `None` where there is no QEMU.
    fn start(most: usize) -> Option<Platform> {
        let daemon = PeerProgram::require("qemu-storage-daemon")?;
        let scratch = ScratchDir::new().unwrap();
        let disk = scratch.file("disk").display().to_string();
        succeed(&["copy", "random:16M?seed=1", &disk]);
        let control = scratch.socket("q");
        let nbd = scratch.socket("n");
        let mut command = daemon.tied_command();
        command.args(["--blockdev", &format!("driver=file,filename={disk},node-name=disk0")]);
        let monitor = format!("socket,id=c,path={},server=on,wait=off", control.display());
        command.args(["--chardev", &monitor, "--monitor", "chardev=c"]).stdin(Stdio::null());
        let daemon = command.spawn().unwrap();
        let mut qmp = Qmp::connect(&control);
        let address = json!({ "type": "unix", "data": { "path": nbd } });
        order(&mut qmp, "nbd-server-start", &json!({ "addr": address, "max-connections": 0 }));
        let now = json!({ "type": "nbd", "id": "now", "node-name": "disk0", "name": "now", "writable": true });
        order(&mut qmp, "block-export-add", &now);
        let state = State { qmp, bitmaps: Vec::new(), open: 0, seen: Vec::new() };
        let shared = Arc::new(Shared { state: Mutex::new(state), nbd, most });
        let http = scratch.socket("h");
        let listener = UnixListener::bind(&http).unwrap();
        let served = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let served = served.clone();
                // A client that has gone ends its thread.
                std::thread::spawn(move || drop(client.map(|client| served.serve(client))));
            }
        });
        Some(Platform { daemon, shared, http, scratch })
    }

    fn file(&self, name: &str) -> String {
        self.scratch.file(name).display().to_string()
    }

    /// Asks the server, and returns its answer.
    fn ask(&self, method: &str, target: &str, body: &str) -> String {
        let mut stream = UnixStream::connect(&self.http).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// The machine writes, and what the disk then holds is kept as `name`.
    fn write(&self, range: &str, seed: u32, name: &str) {
        let uri = format!("nbd+unix:///now?socket={}", self.shared.nbd.display());
        succeed(&["copy", "--range", range, &format!("random:16M?seed={seed}"), &uri]);
        self.keep(name);
    }

    fn keep(&self, name: &str) {
        fs::copy(self.scratch.file("disk"), self.scratch.file(name)).unwrap();
    }

    fn seen(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.state.lock().unwrap().seen)
    }

    fn job(&self, uri: &str) {
        let store = self.file("vm1-vda");
        fs::write(
            self.scratch.file("vm1.toml"),
            format!("[[disk]]\nname = 'vda'\nsource = '{uri}'\nstore = '{store}'\n"),
        )
        .unwrap();
    }

    fn assert_restores(&self, points: &[&str]) {
        for point in points {
            let device = format!("backup:{}?point={point}", self.file("vm1-vda"));
            succeed(&["compare", "--strict", &device, &self.file(point)]);
        }
    }
}

impl Shared {
    fn serve(&self, mut client: UnixStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(client.try_clone()?);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let mut words = head.split(' ');
        let (method, target) = (words.next().unwrap(), words.next().unwrap());
        let path = target.split('?').next().unwrap();
        self.state.lock().unwrap().seen.push(format!("{method} {target}"));
        let upgrade = head.contains("Upgrade: nbd\r\n") && head.contains("Connection: Upgrade\r\n");
        // A volume has the default export only, a snapshot one for each device.
        for (known, place, name) in
            [("GET", &format!("{VOLUME}/nbd")[..], ""), ("GET", SNAPSHOT, "root")]
        {
            if (known, place) == (method, path) && upgrade {
                return self.nbd(client, reader, name);
            }
        }
        let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        reader.read_exact(&mut body)?;
        let answer = self.api(method, path, &body);
        let (status, body) = answer.unwrap_or_else(|error| {
            ("400 Bad Request", json!({ "type": "error", "error_code": 400, "error": error }))
        });
        let body = body.to_string();
        write!(
            client,
            "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    /// Bitmaps: lists them, makes one, removes one.
    fn api(&self, method: &str, path: &str, body: &[u8]) -> Result<(&'static str, Value), String> {
        let state = &mut *self.state.lock().unwrap();
        if path == format!("{VOLUME}/nbd") {
            let missing = json!({ "type": "error", "error_code": 501, "error": "not implemented" });
            return Ok(("501 Not Implemented", missing));
        }
        let Some(rest) = path.strip_prefix(&format!("{VOLUME}/bitmaps")) else {
            return Ok((
                "404 Not Found",
                json!({ "type": "error", "error_code": 404, "error": "not found" }),
            ));
        };
        match (method, rest.strip_prefix('/')) {
            ("GET", None) => {}
            ("POST", None) => {
                let body: Value =
                    serde_json::from_slice(body).map_err(|error| error.to_string())?;
                let name = body["name"].as_str().ok_or("no name")?;
                state.qmp.answer(&line(
                    "block-dirty-bitmap-add",
                    &json!({ "node": "disk0", "name": name }),
                ))?;
                state.bitmaps.push(name.to_owned());
            }
            ("DELETE", Some(name)) => {
                state.qmp.answer(&line(
                    "block-dirty-bitmap-remove",
                    &json!({ "node": "disk0", "name": name }),
                ))?;
                state.bitmaps.retain(|there| there != name);
            }
            _ => return Err("unknown method".to_owned()),
        }
        let done = json!({ "type": "sync", "status": "Success", "status_code": 200, "metadata": state.bitmaps });
        Ok(("200 OK", done))
    }

    /// Exports the disk for this connection, and passes on what follows.
    fn nbd(
        &self,
        mut client: UnixStream,
        mut reader: BufReader<UnixStream>,
        name: &str,
    ) -> std::io::Result<()> {
        {
            let mut state = self.state.lock().unwrap();
            if state.open == self.most {
                let text = "{\"type\":\"error\",\"error\":\"NBD server already running\",\"error_code\":400}";
                return write!(
                    client,
                    "HTTP/1.1 400 Bad Request\r\nContent-Length: {}\r\n\r\n{text}",
                    text.len()
                );
            }
            if state.open == 0 {
                // What they mark at this moment.
                let bitmaps: Vec<Value> = (state.bitmaps.iter())
                    .map(|name| json!({ "node": "point", "name": name }))
                    .collect();
                let size = 16 << 20;
                let point = json!({ "driver": "null-co", "node-name": "point", "size": size });
                order(&mut state.qmp, "blockdev-add", &point);
                for name in state.bitmaps.clone() {
                    let kept = json!({ "node": "point", "name": name, "disabled": true });
                    order(&mut state.qmp, "block-dirty-bitmap-add", &kept);
                    let from = json!([{ "node": "disk0", "name": name }]);
                    let merge = json!({ "node": "point", "target": name, "bitmaps": from });
                    order(&mut state.qmp, "block-dirty-bitmap-merge", &merge);
                }
                let export = json!({ "type": "nbd", "id": "volume", "node-name": "disk0", "name": name, "bitmaps": bitmaps });
                order(&mut state.qmp, "block-export-add", &export);
            }
            state.open += 1;
        }
        let result = self.relay(&mut client, &mut reader);
        let mut state = self.state.lock().unwrap();
        state.open -= 1;
        if state.open == 0 {
            let remove = json!({ "id": "volume", "mode": "hard" });
            order(&mut state.qmp, "block-export-del", &remove);
            tools::until("the export is gone", || {
                let left = state.qmp.answer(r#"{"execute": "query-block-exports"}"#).unwrap();
                left.as_array().unwrap().len() == 1
            });
            order(&mut state.qmp, "blockdev-del", &json!({ "node-name": "point" }));
        }
        result
    }

    fn relay(
        &self,
        client: &mut UnixStream,
        reader: &mut BufReader<UnixStream>,
    ) -> std::io::Result<()> {
        client.write_all(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: nbd\r\nConnection: Upgrade\r\n\r\n",
        )?;
        let mut server = UnixStream::connect(&self.nbd)?;
        let mut back = server.try_clone()?;
        let mut to_client = client.try_clone()?;
        let answers = std::thread::spawn(move || {
            let _ = std::io::copy(&mut back, &mut to_client);
            to_client.shutdown(Shutdown::Both)
        });
        let _ = std::io::copy(reader, &mut server);
        let _ = server.shutdown(Shutdown::Both);
        let _ = answers.join();
        Ok(())
    }
}

impl Drop for Platform {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn line(command: &str, arguments: &Value) -> String {
    json!({ "execute": command, "arguments": arguments }).to_string()
}

#[track_caller]
fn order(qmp: &mut Qmp, command: &str, arguments: &Value) {
    qmp.done(&line(command, arguments));
}

/// The commands of a page that ask a server for this.
fn commands(page: &str, part: &str) -> Vec<String> {
    let lines = page.lines().filter(|line| line.starts_with("blockhaul ") && line.contains(part));
    lines.map(str::to_owned).collect()
}

/// Runs a line of a page in the directory of the test.
#[track_caller]
fn shell(platform: &Platform, line: &str) -> String {
    let mut path = platform.scratch.file("bin").into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut command = Command::new("sh");
    command.args(["-ec", line]).current_dir(platform.scratch.path()).env("PATH", path);
    patiently(line, &mut command)
}

/// Runs a command again while the server has not ended the connection of the one before, as the page says.
#[track_caller]
fn patiently(name: &str, command: &mut Command) -> String {
    tools::until_ok(name, || {
        let output = tools::output(command, LIMIT).unwrap();
        let said = text(&output.stderr);
        if said.contains("NBD server already running") && !output.status.success() {
            return Err(said);
        }
        assert!(output.status.success(), "{name}: {said}");
        Ok(text(&output.stdout))
    })
}

/// A directory for programs, with ours and with one that prints what the page asks jq for.
fn programs(platform: &Platform) {
    let bin = platform.scratch.file("bin");
    fs::create_dir(&bin).unwrap();
    symlink(OURS, bin.join("blockhaul")).unwrap();
    let jq = bin.join("jq");
    let last = "#!/bin/sh\ntest \"$*\" = '-r .points[-1].name' || exit 9\n\
                sed 's/\"[^\"]*\":{[^}]*}//g' | grep -o '\"name\":\"[^\"]*\"' | tail -n 1 | cut -d '\"' -f 4\n";
    fs::write(&jq, last).unwrap();
    fs::set_permissions(&jq, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_page_copies_volumes_of_incus_and_snapshots_of_lxd() {
    let (Some(platform), Some(python)) = (Platform::start(1), PeerProgram::require("python3"))
    else {
        return;
    };
    programs(&platform);
    let pki = platform.file("pki");
    succeed(&["tls", "init", "--host", "host", &pki]);
    let tls = platform.scratch.socket("t");
    let http = platform.http.to_str().unwrap();
    let _tls = tls_relay::start(&python, &tls, http, &pki, Clients::WithCertificates, None);
    let lines = commands(BACKUPS, "/1.0/");
    assert_eq!(lines.len(), 3, "{lines:?}");
    for line in lines {
        // The name stays, for the certificate and for the request.
        let sockets =
            [("tls-certificates=pki", &tls), ("socket=/var/lib/incus/unix.socket", &platform.http)];
        let mut own = line.clone();
        for (part, socket) in sockets {
            let more = if part.starts_with("tls") { format!("{part}&") } else { String::new() };
            own = own.replace(part, &format!("{more}socket={}", socket.display()));
        }
        assert_ne!(own, line);
        let said = shell(&platform, &own);
        if line.starts_with("blockhaul copy") {
            succeed(&["compare", "--strict", &platform.file("disk.raw"), &platform.file("disk")]);
            fs::remove_file(platform.scratch.file("disk.raw")).unwrap();
        } else {
            assert!(said.contains("16777216"), "{said}");
        }
    }
    // A second connection would be of another moment: the copy asks for one.
    let seen = platform.seen();
    let [post, get] = ["POST", "GET"].map(|method| format!("{method} {VOLUME}/nbd?project=p"));
    assert_eq!(seen[..2], [post, get]);
    assert!(seen.contains(&format!("GET {SNAPSHOT}")), "{seen:?}");
    let uri = format!("nbd+http://incus{VOLUME}x/nbd?socket={}", platform.http.display());
    let output = tools::output(Command::new(OURS).args(["info", &uri]), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(said.contains("\"HTTP/1.1 404 Not Found\"; check the path"), "{said}");
}

#[test]
fn a_bitmap_of_incus_is_copied_and_pulled_as_the_page_says() {
    let Some(platform) = Platform::start(1) else { return };
    programs(&platform);
    let uri = format!("nbd+http://incus{VOLUME}/nbd?socket={}", platform.http.display());
    platform.job(&uri);
    let made = platform.ask("POST", &format!("{VOLUME}/bitmaps"), r#"{"name": "b0"}"#);
    assert!(made.starts_with("HTTP/1.1 200 OK") && made.contains("b0"), "{made}");
    platform.keep("monday");
    shell(&platform, "blockhaul pull vm1.toml --point monday");
    platform.write("1M:2M", 2, "tuesday");
    // Bitmap and data through one connection.
    let copy = platform.file("copy");
    fs::copy(platform.scratch.file("monday"), &copy).unwrap();
    shell(&platform, &format!("blockhaul copy --bitmap qemu:dirty-bitmap:b0 '{uri}' '{copy}'"));
    succeed(&["compare", "--strict", &copy, &platform.file("tuesday")]);
    let lines = commands(INCREMENTS, "--bitmap b0");
    let [line] = &lines[..] else { panic!("{lines:?}") };
    let said = shell(&platform, &format!("{line} --point tuesday"));
    assert!(said.contains("tuesday is an increment of monday: 2097152 of"), "{said}");
    platform.write("8M:1M", 3, "wednesday");
    // The bitmap has recorded all since monday.
    let said = shell(&platform, &format!("{line} --point wednesday"));
    assert!(said.contains("wednesday is an increment of tuesday: 3145728 of"), "{said}");
    platform.assert_restores(&["monday", "tuesday", "wednesday"]);
    // A bitmap that is gone.
    platform.ask("DELETE", &format!("{VOLUME}/bitmaps/b0"), "");
    platform.write("9M:1M", 4, "thursday");
    let said = shell(&platform, &format!("{line} --point thursday"));
    assert!(said.contains("thursday is a full backup") && said.contains("no bitmap"), "{said}");
    platform.assert_restores(&["monday", "tuesday", "wednesday", "thursday"]);
}

#[test]
fn snapshots_of_lxd_are_pulled_as_the_page_says() {
    let Some(platform) = Platform::start(usize::MAX) else { return };
    programs(&platform);
    let socket = platform.http.display();
    platform.job(&format!("nbd+http://lxd{SNAPSHOT}?method=GET&export=root&socket={socket}"));
    let bitmap = |name: &str| {
        platform.ask("POST", &format!("{VOLUME}/bitmaps"), &json!({ "name": name }).to_string());
    };
    bitmap("monday");
    platform.keep("monday");
    succeed(&["pull", &platform.file("vm1.toml"), "--point", "monday"]);
    platform.write("3M:5M", 2, "tuesday");
    bitmap("tuesday");
    let lines = commands(INCREMENTS, "pull vm1.toml --bitmap monday --point tuesday");
    let said = shell(&platform, &lines[0]);
    assert!(said.contains("tuesday is an increment of monday: 5242880 of"), "{said}");
    platform.assert_restores(&["monday", "tuesday"]);
}
