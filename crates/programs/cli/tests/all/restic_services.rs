//! Repositories of restic that are written to object stores and through restic's REST protocol, judged by restic.

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, PeerProgram, ScratchDir, long, text};

use crate::fault_proxy::{FaultProxy, RequestFate};
use crate::pull::Machine;
use crate::remote::{ObjectServer, ports, start};
use crate::served_disk::{ChildGuard, LIMIT, OURS};

const PAGE: &str = include_str!("../../../../../docs/restic.md");
/// The delay of a service that is far away.
const FAR: Duration = Duration::from_millis(20);

/// A service with repositories, and a proxy in front of it.
struct Service<'a> {
    restic: PeerProgram,
    scratch: &'a ScratchDir,
    proxy: FaultProxy,
    /// A repository, in restic's spelling and in ours, both before its name.
    theirs: String,
    ours: String,
    environment: Vec<(&'static str, String)>,
}

impl Service<'_> {
    /// The outcome of restic with a repository, without the proxy.
    fn restic(&self, name: &str, args: &[&str]) -> String {
        let mut command = self.restic.command();
        command.args(args).args(["--no-cache", "--password-file"]);
        command
            .arg(self.scratch.file("password"))
            .arg("--repo")
            .arg(format!("{}{name}", self.theirs));
        command.args(["-o", "s3.bucket-lookup=path"]);
        command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "testtest");
        command.env("RESTIC_REST_USERNAME", "user").env("RESTIC_REST_PASSWORD", "se cret@");
        let output = tools::output(command.current_dir(self.scratch.path()), LIMIT).unwrap();
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    fn check(&self, name: &str) {
        let output = self.restic(name, &["check", "--read-data"]);
        assert!(output.contains("no errors were found"), "{output}");
        assert!(!output.contains("warning") && !output.contains("additional files"), "{output}");
    }

    fn snapshots(&self, name: &str) -> usize {
        self.restic(name, &["list", "snapshots", "--no-lock"]).lines().count()
    }

    fn spec(&self, name: &str, place: &str) -> String {
        format!("restic:{}{name}#{place}", self.ours)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(OURS);
        command.args(args).current_dir(self.scratch.path());
        command.env("HOME", self.scratch.path()).env("RESTIC_PASSWORD_FILE", "password");
        command.envs(self.environment.iter().map(|(key, value)| (key, value)));
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        let output = tools::output(&mut self.command(args), LIMIT).unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!said.contains("se cret") && !said.contains("se%20cret"), "{said}");
        output
    }

    #[track_caller]
    fn succeed(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Fails with this status, and these words.
    #[track_caller]
    fn refuse(&self, args: &[&str], status: i32, words: &[&str]) {
        let output = self.run(args);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{args:?}: {said}");
    }

    fn disk(&self, seed: u64) -> Vec<u8> {
        let mut bytes = Rng::new(seed).disk(21 << 20, 3_000_000, 70);
        bytes.extend([7; 512]);
        fs::write(self.scratch.file("disk.raw"), &bytes).unwrap();
        bytes
    }

    fn all_is_written_and_judged(&self) {
        let mut bytes = self.disk(31);
        let (new, latest) =
            (self.spec("one", "new/vm/vda?init=on"), self.spec("one", "latest/vm/vda"));
        self.refuse(
            &["copy", "disk.raw", &self.spec("one", "new/vm/vda")],
            3,
            &["no file config", "init=on"],
        );
        self.succeed(&["copy", "disk.raw", &new]);
        self.succeed(&["compare", "--strict", "disk.raw", &latest]);
        self.check("one");
        // Nothing new is written but a snapshot.
        let packs = self.restic("one", &["list", "packs", "--no-lock"]).lines().count();
        self.succeed(&["copy", "disk.raw", &new]);
        let more = self.restic("one", &["list", "packs", "--no-lock"]).lines().count() - packs;
        assert!(more <= 1, "{more}");
        bytes[5 << 20..(5 << 20) + 9999].fill(3);
        fs::write(self.scratch.file("disk.raw"), &bytes).unwrap();
        self.succeed(&["copy", "--range", "5M:64k", "disk.raw", &new]);
        let restored = self.scratch.file("restored");
        self.restic("one", &["restore", "latest", "--target", "restored"]);
        assert!(fs::read(restored.join("vm/vda")).unwrap() == bytes);
        fs::remove_dir_all(restored).unwrap();
        self.restic("one", &["forget", "--keep-last", "1", "--prune", "--max-unused", "0"]);
        self.check("one");
        let compare = format!("'{OURS}' compare --strict disk.raw \"$uri\"");
        self.succeed(&["serve", "--readonly", &latest, "--run", &compare]);
        self.succeed(&["copy", &latest, "again.raw"]);
        assert!(fs::read(self.scratch.file("again.raw")).unwrap() == bytes);
        let listed = self.succeed(&["info", "--list", &self.spec("one", "")]);
        assert!(listed.trim_end().ends_with("/vm/vda"), "{listed}");
        assert_eq!(self.restic("one", &["list", "locks", "--no-lock"]), "");
    }

    /// The line of the page with this word, with another place.
    fn the_page_is_right(&self, word: &str, place: (&str, &str)) {
        let section = PAGE.split("### Object stores and REST servers\n```\n").nth(1).unwrap();
        let mut lines = section.split("```").next().unwrap().lines();
        let line = lines.rfind(|line| line.contains(word)).unwrap();
        let line = line.replace("/var/images/vm.raw", "disk.raw").replace(place.0, place.1);
        let line = line.replace("blockhaul ", &format!("'{OURS}' "));
        assert!(!line.contains("HOST"), "{line}");
        let ours = self.command(&[]);
        let mut shell = Command::new("sh");
        let variables = ours.get_envs().filter_map(|(key, value)| Some((key, value?)));
        shell.args(["-ec", &line]).envs(variables).current_dir(self.scratch.path());
        let output = tools::output(&mut shell, LIMIT).unwrap();
        assert!(output.status.success(), "{line}: {}", text(&output.stderr));
        self.check("page");
    }

    fn pulls_with_bitmaps_are_snapshots(&self) {
        let machine = Machine::new();
        let store = self.spec("pulled", "vms?init=on");
        let job = format!(
            "[[disk]]\nname = 'vda'\nsource = '{}'\nstore = '{store}'\nfiles = ['vm.xml']\n",
            machine.uri()
        );
        fs::write(self.scratch.file("job.toml"), job).unwrap();
        fs::write(self.scratch.file("vm.xml"), "<domain/>").unwrap();
        machine.begin_bitmap("monday");
        machine.keep("monday");
        self.succeed(&["pull", "job.toml", "--point", "monday"]);
        machine.write("2M:1M", "pattern", "tuesday");
        let said = self.succeed(&["pull", "job.toml", "--bitmap", "monday", "--point", "tuesday"]);
        assert!(said.contains("1048576 of 16777216 bytes have changed"), "{said}");
        for point in ["monday", "tuesday"] {
            let device = self.spec("pulled", &format!("latest/vms/vda?tag=vda:point={point}"));
            self.succeed(&["compare", "--strict", &machine.file(point), &device]);
        }
        self.succeed(&["compare", "vm.xml", &self.spec("pulled", "latest/vms/vm.xml")]);
        self.check("pulled");
    }

    /// First runs make one repository.
    fn first_runs_share_one_repository(&self, rounds: usize) {
        self.disk(32);
        for round in 0..rounds {
            let name = format!("first{round}");
            let mut runs: Vec<_> = (0..3)
                .map(|number| {
                    let target = self.spec(&name, &format!("new/disk{number}?init=on"));
                    let mut command = self.command(&["copy", "--no-progress", "disk.raw", &target]);
                    ChildGuard(command.stdin(Stdio::null()).spawn().unwrap())
                })
                .collect();
            assert!(runs.iter_mut().all(|run| run.0.wait().unwrap().success()), "{round}");
            assert_eq!(self.restic(&name, &["list", "keys", "--no-lock"]).lines().count(), 1);
            assert_eq!(self.snapshots(&name), 3);
            self.restic(&name, &["check", "--read-data"]);
        }
    }

    /// `sends`: how a request for a file begins. `gone`: the answer of a server whose repositories were removed.
    fn answers_that_are_lost_change_nothing(
        &self,
        sends: &'static str,
        gone: (&'static str, &'static str),
    ) {
        let new = self.spec("faults", "new/disk?init=on");
        let latest = self.spec("faults", "latest/disk");
        for seed in 40..if long() { 60 } else { 41 } {
            println!("seed {seed}");
            self.disk(seed);
            let mut rng = Rng::new(seed);
            self.proxy.set(move |_| match rng.below(10) {
                0 | 1 => RequestFate::AnswerLost,
                2 => RequestFate::Lost,
                3 => RequestFate::Refused("503 Service Unavailable", ""),
                _ => RequestFate::Passed,
            });
            self.succeed(&["copy", "disk.raw", &new]);
            self.proxy.set(|_| RequestFate::Passed);
            self.succeed(&["compare", "disk.raw", &latest]);
            assert_eq!(self.restic("faults", &["list", "locks", "--no-lock"]), "");
            self.restic("faults", &["check", "--read-data"]);
        }
        let before = self.snapshots("faults");
        self.disk(60);
        let full = |status, text| {
            move |line: &str| {
                let is_pack = line.starts_with(sends) && line.contains("/data/");
                if is_pack { RequestFate::Refused(status, text) } else { RequestFate::Passed }
            }
        };
        self.proxy.set(full("507 Insufficient Storage", "no space is left"));
        self.refuse(&["copy", "disk.raw", &new], 6, &["raise its quota"]);
        self.proxy.set(full("403 Forbidden", "<Error><Code>AccessDenied</Code></Error>"));
        self.refuse(&["copy", "disk.raw", &new], 5, &["check the"]);
        assert_eq!(self.restic("faults", &["list", "locks", "--no-lock"]), "");
        // All is gone from the first pack on.
        let mut has_begun = false;
        self.proxy.set(move |line| {
            has_begun |= line.starts_with(sends) && line.contains("/data/");
            if has_begun { RequestFate::Refused(gone.0, gone.1) } else { RequestFate::Passed }
        });
        self.refuse(&["copy", "disk.raw", &new], 5, &["faults"]);
        self.proxy.set(|_| RequestFate::Passed);
        assert_eq!(self.snapshots("faults"), before);
        self.restic("faults", &["unlock", "--remove-all"]);
        self.succeed(&["copy", "disk.raw", &new]);
        self.succeed(&["compare", "disk.raw", &latest]);
        self.check("faults");
    }

    fn killed_copies_leave_packs_that_are_used(&self) {
        let new = self.spec("killed", "new/disk?init=on");
        let mut bytes = self.disk(70);
        self.succeed(&["copy", "disk.raw", &new]);
        let mut rng = Rng::new(71);
        for round in 0..if long() { 20 } else { 1 } {
            rng.fill(&mut bytes);
            fs::write(self.scratch.file("disk.raw"), &bytes).unwrap();
            let mut copy = self.command(&["copy", "--no-progress", "disk.raw", &new]);
            let copy = copy.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let mut copy = ChildGuard(copy);
            let packs = self.restic("killed", &["list", "packs", "--no-lock"]).lines().count();
            let begun = Instant::now();
            while copy.0.try_wait().unwrap().is_none()
                && self.restic("killed", &["list", "packs", "--no-lock"]).lines().count() == packs
            {
                assert!(begun.elapsed() < LIMIT, "{round}");
            }
            drop(copy);
            self.succeed(&["copy", "disk.raw", &new]);
            self.succeed(&["compare", "disk.raw", &self.spec("killed", "latest/disk")]);
            self.restic("killed", &["unlock", "--remove-all"]);
            self.check("killed");
        }
    }
}

/// With the server of the other tests: a second one on this machine does not listen.
pub fn repositories_in_s3_are_written(server: &ObjectServer) {
    let Some(restic) = PeerProgram::require("restic") else { return };
    fs::write(server.scratch.file("password"), "secret").unwrap();
    let endpoint = server.endpoint();
    let port = endpoint.rsplit(':').next().unwrap().parse().unwrap();
    let proxy = FaultProxy::start(port, FAR);
    let environment = [
        ("AWS_ENDPOINT_URL", proxy.endpoint()),
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "testtest".to_owned()),
    ];
    let service = Service {
        restic,
        scratch: &server.scratch,
        proxy,
        theirs: format!("s3:{endpoint}/disks/written/"),
        ours: "s3://disks/written/".to_owned(),
        environment: environment.to_vec(),
    };
    service.all_is_written_and_judged();
    let ours = (
        "s3://backups/vms#new/vm1/vda?endpoint=https://HOST:9000",
        &*format!("s3://disks/written/page#new/vm1/vda?endpoint={}", service.proxy.endpoint()),
    );
    service.the_page_is_right("s3://", ours);
    service.pulls_with_bitmaps_are_snapshots();
    service.first_runs_share_one_repository(if long() { 20 } else { 1 });
    let gone = "<Error><Code>NoSuchBucket</Code><Message>no bucket</Message></Error>";
    service.answers_that_are_lost_change_nothing("PUT ", ("404 Not Found", gone));
    service.killed_copies_leave_packs_that_are_used();
    let absent = "restic:s3://nothing/x#new/disk?init=on";
    service.refuse(&["copy", "disk.raw", absent], 3, &["NoSuchBucket"]);
}

#[test]
fn repositories_behind_a_rest_server_are_read_and_written() {
    let restic = require_peer!("restic");
    let rclone = require_peer!("rclone");
    let scratch = ScratchDir::new().unwrap();
    fs::write(scratch.file("password"), "secret").unwrap();
    fs::create_dir(scratch.file("served")).unwrap();
    let [port] = ports();
    let mut command = rclone.command();
    command.args([
        "serve",
        "restic",
        "--addr",
        &format!("127.0.0.1:{port}"),
        "--config",
        "/dev/null",
    ]);
    command.args(["--user", "user", "--pass", "se cret@"]).arg(scratch.file("served"));
    let _server = start(&mut command, port);
    let proxy = FaultProxy::start(port, Duration::ZERO);
    let ours = format!("rest:{}/", proxy.endpoint());
    let secrets = [("RESTIC_REST_USERNAME", "user"), ("RESTIC_REST_PASSWORD", "se cret@")];
    let service = Service {
        restic,
        scratch: &scratch,
        proxy,
        theirs: format!("rest:http://127.0.0.1:{port}/"),
        ours,
        environment: secrets.map(|(key, value)| (key, value.to_owned())).to_vec(),
    };
    service.all_is_written_and_judged();
    let place = format!("{}/page/", service.proxy.endpoint());
    service.the_page_is_right("rest:", ("https://HOST:8000/vms/", &place));
    service.pulls_with_bitmaps_are_snapshots();
    let gone = ("404 Not Found", "");
    service.answers_that_are_lost_change_nothing("POST ", gone);
    service.killed_copies_leave_packs_that_are_used();
    // User and password in the URL, and others.
    let latest = "one/#latest/vm/vda";
    let of = |login: &str| format!("restic:rest:http://{login}127.0.0.1:{port}/{latest}");
    let run = |spec: &str, user: Option<&str>| {
        let mut command = service.command(&["info", spec]);
        command.env_remove("RESTIC_REST_USERNAME").env_remove("RESTIC_REST_PASSWORD");
        command.envs(user.map(|user| ("RESTIC_REST_USERNAME", user)));
        let output = tools::output(&mut command, LIMIT).unwrap();
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!said.contains("se%20cret") && !said.contains("se cret"), "{said}");
        (output.status.success(), said)
    };
    let (succeeded, said) = run(&of("user:se%20cret%40@"), None);
    assert!(succeeded && said.contains("visible to other users"), "{said}");
    for (login, user) in [("", None), ("", Some("user")), ("user:other@", None)] {
        let (succeeded, said) = run(&of(login), user);
        assert!(!succeeded && said.contains("RESTIC_REST_USERNAME"), "{said}");
    }
    let (_, said) = run("restic:rest:http://user:se%20cret@127.0.0.1:1/x#latest/a", None);
    assert!(said.contains("cannot connect"), "{said}");
    let (_, said) = run("restic:rest:ftp://user:se%20cret@127.0.0.1:1/x#latest/a", None);
    assert!(said.contains("not a URL of http or https"), "{said}");
}
