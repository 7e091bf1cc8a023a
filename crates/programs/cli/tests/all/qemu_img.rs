//! The program as `qemu-img`, next to QEMU's: the same output and exit statuses.

use std::os::unix::fs::MetadataExt as _;
use std::process::{Command, Output};
use std::time::Duration;

use blockhaul_testkit::tools::{self, PeerProgram, PeerServer, ScratchDir, text};

const OURS: &str = env!("CARGO_BIN_EXE_blockhaul");
const LIMIT: Duration = Duration::from_secs(60);

struct Tools {
    img: PeerProgram,
    io: PeerProgram,
    scratch: ScratchDir,
}

impl Tools {
    fn find() -> Option<Tools> {
        let img = PeerProgram::require("qemu-img")?;
        let io = PeerProgram::require("qemu-io")?;
        Some(Tools { img, io, scratch: ScratchDir::new().unwrap() })
    }

    fn output(&self, mut command: Command, line: &str) -> Output {
        let words = line.split_whitespace();
        tools::output(command.args(words).current_dir(self.scratch.path()), LIMIT).unwrap()
    }

    fn theirs(&self, line: &str) -> Output {
        self.output(self.img.command(), line)
    }

    fn made(&self, line: &str) {
        let made = self.theirs(line);
        assert!(made.status.success(), "{line}: {}", text(&made.stderr));
    }

    fn ours(&self, line: &str) -> Output {
        let mut command = Command::new(OURS);
        command.args(["compat", "qemu-img"]);
        self.output(command, line)
    }

    fn io(&self, image: &str, commands: &[&str]) {
        let mut command = self.io.command();
        commands.iter().for_each(|one| {
            command.args(["-c", one]);
        });
        let done = self.output(command, image);
        assert!(done.status.success(), "{image}: {}", text(&done.stderr));
    }

    /// Two images have disks of one size and content.
    fn same_disks(&self, format: &str, one: &str, other: &str) {
        self.made(&format!("compare -f {format} -F {format} {one} {other}"));
        let [one, other] = [one, other].map(|image| {
            let shown = text(&self.theirs(&format!("info -f {format} {image}")).stdout);
            shown.lines().find(|line| line.starts_with("virtual size")).map(str::to_string)
        });
        assert_eq!(one, other);
    }

    /// Both print the same on standard output, and end with the same status.
    fn same(&self, line: &str) {
        let theirs = self.theirs(line);
        let ours = self.ours(line);
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.scratch.file(name)).unwrap()
    }
}

/// Images of several kinds, made by QEMU.
fn images(tools: &Tools) -> Vec<&'static str> {
    tools.made("create -q -f raw a.raw 5M");
    tools.io("-f raw a.raw", &["write -P 3 1M 64k"]);
    tools.made("create -q -f qcow2 a.qcow2 10M");
    tools.io("a.qcow2", &["write -P 7 1M 128k", "write -z 4M 64k"]);
    tools.made("create -q -f qcow2 -b a.qcow2 -F qcow2 over.qcow2");
    tools.io("over.qcow2", &["write -P 9 3M 64k"]);
    tools.made("create -q -f qcow2 -o compat=0.10 -b a.raw -F raw old.qcow2 6M");
    tools.made(
        "create -q -f qcow2 -o extended_l2=on,compression_type=zstd,cluster_size=128k x.qcow2 4M",
    );
    tools.made("create -q -f qcow2 -b a.qcow2 -F qcow2 long.qcow2 12M");
    tools.io("x.qcow2", &["write -P 1 0 4k"]);
    tools.made("convert -q -c -O qcow2 a.qcow2 packed.qcow2");
    tools.made(
        "create -q -f qcow2 -o lazy_refcounts=on,refcount_bits=1,cluster_size=4k tiny.qcow2 1M",
    );
    tools.made("create -q -f qcow2 snap.qcow2 1M");
    tools.io("snap.qcow2", &["write -P 5 0 64k"]);
    tools.made("snapshot -c first snap.qcow2");
    tools.made("bitmap --add snap.qcow2 b0");
    tools.made("bitmap --add --disable snap.qcow2 b1");
    vec![
        "a.qcow2",
        "over.qcow2",
        "old.qcow2",
        "long.qcow2",
        "x.qcow2",
        "packed.qcow2",
        "tiny.qcow2",
        "snap.qcow2",
    ]
}

#[test]
fn images_are_described_as_qemu_img_does() {
    let Some(tools) = Tools::find() else { return };
    let all = images(&tools);
    for image in all.iter().copied().chain(["a.raw"]) {
        for output in ["human", "json"] {
            tools.same(&format!("info --output={output} {image}"));
            tools.same(&format!("info -U --output={output} --backing-chain {image}"));
            // Offsets of clusters without data are not known here.
            let differs =
                matches!((image, output), ("packed.qcow2", "human") | ("x.qcow2", "json"));
            if !differs {
                tools.same(&format!("map --output={output} {image}"));
            }
        }
        tools.same(&format!("snapshot -l {image}"));
    }
    tools.same("map --output=json -s 1M -l 2M over.qcow2");
    for wrong in ["info missing", "map missing", "check missing", "info", "frobnicate x"] {
        tools.same(wrong);
    }
    let refused = tools.ours("map packed.qcow2");
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("compressed clusters"), "{}", text(&refused.stderr));
}

#[test]
fn limits_are_shown_where_qemu_img_shows_them() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -f raw a.raw 8M");
    tools.made("create -f qcow2 -b a.raw -F raw a.qcow2");
    let shown = text(&tools.ours("info --limits --backing-chain -t none a.qcow2").stdout);
    assert_eq!(shown.matches("Block limits:").count(), 4, "{shown}");
    assert!(shown.contains("raw\nBlock limits:\n    write zeroes alignment: 65536\n"), "{shown}");
    let json = text(&tools.ours("info --limits --output=json a.raw").stdout);
    let parsed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(parsed["limits"]["request-alignment"], 512);
    assert_eq!(parsed["children"][0]["info"]["limits"]["max-iov"], 1024);
    assert!(json.starts_with("{\n    \"limits\": {"), "{json}");
    let done = tools.ours("info -t some a.raw");
    assert!(text(&done.stderr).contains("Invalid cache option: some"), "{}", text(&done.stderr));
}

#[test]
fn images_are_checked_compared_and_measured_as_qemu_img_does() {
    let Some(tools) = Tools::find() else { return };
    let all = images(&tools);
    // A cluster that is lost.
    tools.made("create -q -f qcow2 leak.qcow2 1M");
    tools.io("leak.qcow2", &["write 0 128k", "write 512k 64k", "write 256k 64k"]);
    let mut bytes = tools.bytes("leak.qcow2");
    let place = |bytes: &[u8], at: usize| {
        let word = u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        usize::try_from(word & 0x00ff_ffff_ffff_fe00).unwrap()
    };
    let l2 = place(&bytes, place(&bytes, 40));
    bytes[l2 + 8..l2 + 16].fill(0);
    std::fs::write(tools.scratch.file("leak.qcow2"), &bytes).unwrap();
    // One that is used twice.
    bytes.copy_within(l2..l2 + 8, l2 + 24);
    std::fs::write(tools.scratch.file("twice.qcow2"), &bytes).unwrap();
    for image in all.iter().copied().chain(["a.raw", "leak.qcow2"]) {
        for output in ["human", "json"] {
            tools.same(&format!("check --output={output} {image}"));
        }
    }
    // Which of its tables is wrong is a matter of judgement; that one is, is not.
    let [theirs, ours] = [tools.theirs("check twice.qcow2"), tools.ours("check twice.qcow2")];
    assert_eq!((ours.status.code(), theirs.status.code()), (Some(2), Some(2)));
    assert!(text(&ours.stdout).contains("errors were found on the image."), "{ours:?}");
    for image in &all {
        for output in ["human", "json"] {
            tools.same(&format!("measure --output={output} -O qcow2 {image}"));
        }
    }
    tools.same("measure --output=json --size 1G -O qcow2 -o cluster_size=4k");
    tools.same("measure -O raw a.qcow2");
    tools.same("measure -O qcow2 -o compat=0.10 snap.qcow2");
    tools.same("measure -O qcow2 -o compat=7 snap.qcow2");
    for line in [
        "a.qcow2 a.qcow2",
        "a.qcow2 over.qcow2",
        "a.qcow2 packed.qcow2",
        "-f raw -F raw a.raw a.raw",
        "a.raw a.qcow2",
        "-q a.raw a.qcow2",
        "old.qcow2 -F raw a.raw",
        "a.raw missing",
        "a.raw",
    ] {
        tools.same(&format!("compare {line}"));
    }
    // The contents are those of the repair.
    assert_eq!(tools.ours("check -r leaks leak.qcow2").status.code(), Some(0));
    tools.made("check leak.qcow2");
}

#[test]
fn images_are_made_converted_and_resized() {
    let Some(tools) = Tools::find() else { return };
    let all = images(&tools);
    for line in [
        "-f raw new.raw 3M",
        "new.raw 1M",
        "-f qcow2 new.qcow2 10M",
        "-f qcow2 -o cluster_size=128k,extended_l2=on new.qcow2 10M",
        "-f qcow2 -b over.qcow2 -F qcow2 new.qcow2",
        "-f qcow2 -q new.qcow2 1M",
        "-f qcow2 new.qcow2",
        "-f qcow2 -o nonsense=1 new.qcow2 1M",
    ] {
        tools.same(&format!("create {line}"));
    }
    assert!(tools.ours("create -f qcow2 -b over.qcow2 -F qcow2 top.qcow2").status.success());
    tools.made("check -q top.qcow2");
    tools.made("compare over.qcow2 top.qcow2");
    tools.same("info --output=json --backing-chain top.qcow2");
    for image in &all {
        for target in
            ["-O raw out", "-O qcow2 out", "-c -O qcow2 out", "-W -m 16 -t none -O qcow2 out"]
        {
            let line = format!("convert {image} {target}");
            let done = tools.ours(&line);
            assert!(done.status.success(), "{line}: {}", text(&done.stderr));
            assert!(done.stdout.is_empty(), "{line}");
            let format = if target.contains("raw") { "raw" } else { "qcow2" };
            tools.made(&format!("compare -F {format} {image} out"));
            if format == "qcow2" {
                tools.made("check -q -f qcow2 out");
            }
        }
    }
    let done = tools.ours("convert -O qcow2 -B a.qcow2 -F qcow2 over.qcow2 delta.qcow2");
    assert!(done.status.success(), "{}", text(&done.stderr));
    tools.made("compare over.qcow2 delta.qcow2");
    for line in
        ["new.raw +1M", "new.raw 1M", "--shrink new.raw 1M", "new.qcow2 20M", "-q a.qcow2 +1M"]
    {
        tools.same(&format!("resize {line}"));
    }
    // Each has resized once.
    assert_eq!(tools.bytes("new.raw").len(), 1 << 20);
    assert!(tools.ours("rebase -b a.raw -F raw over.qcow2").status.success());
    tools.made("compare over.qcow2 delta.qcow2");
    assert!(tools.ours("bitmap --add top.qcow2 b --disable").status.success());
}

#[test]
fn images_are_amended_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    for name in ["a", "b"] {
        tools.made(&format!("create -q -f qcow2 -o compat=0.10 {name}.qcow2 4M"));
        tools.io(&format!("{name}.qcow2"), &["write -P 3 1M 64k"]);
        tools.made(&format!("snapshot -c one {name}.qcow2"));
    }
    for line in [
        "-o lazy_refcounts=on A",
        "-o compat=0.42 A",
        "-o compat=1.1,lazy_refcounts=on,size=6M A",
        "-o size=1M,size=8M -p A",
        "-o lazy_refcounts=off,backing_file= A",
        "-o lazy_refcounts=on, A",
        "-o backing_file=x A",
        "-o cluster_size=4k A",
        "-o refcount_bits=16 A",
        "-o foo=bar A",
        "A",
        "-o size=1M missing",
        "-f raw -o size=1M A",
    ] {
        let theirs = tools.theirs(&format!("amend {}", line.replace('A', "a.qcow2")));
        let ours = tools.ours(&format!("amend {}", line.replace('A', "b.qcow2")));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
        let facts = |name: &str| {
            let shown = text(&tools.theirs(&format!("info {name}.qcow2")).stdout);
            let kept = |line: &&str| ["virtual", "    "].iter().any(|one| line.starts_with(one));
            let own = shown.split("Child node").next().unwrap_or_default();
            let all = own.lines().filter(kept).map(str::to_string);
            all.collect::<Vec<_>>()
        };
        assert_eq!(facts("b"), facts("a"), "{line}");
        tools.made("check -q b.qcow2");
    }
    tools.made("compare a.qcow2 b.qcow2");
    for (line, why) in [
        ("-o compat=0.10 b.qcow2", "compat=0.10 is not supported"),
        ("-o refcount_bits=64 b.qcow2", "refcount_bits is not supported"),
    ] {
        let said = tools.ours(&format!("amend {line}"));
        assert!(text(&said.stderr).contains(why), "{}", text(&said.stderr));
    }
}

#[test]
fn options_of_images_are_listed() {
    let Some(tools) = Tools::find() else { return };
    let names = |output: &Output| {
        let shown = text(&output.stdout);
        let all = shown.lines().filter_map(|line| line.trim().split_once("=<"));
        all.map(|(name, _)| name.to_string()).collect::<Vec<_>>()
    };
    for line in ["create -f qcow2 -o help x", "convert -O raw -o a=b,?", "amend -f qcow2 -o help"] {
        let [theirs, ours] = [tools.theirs(line), tools.ours(line)];
        let all = names(&theirs);
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
        assert!(names(&ours).len() > 1, "{line}: {}", text(&ours.stdout));
        for name in names(&ours).iter().filter(|name| *name != "preallocation") {
            assert!(all.contains(name), "{line}: {name}");
        }
    }
    for line in ["create -f bochs -o help", "amend -f raw -o help", "create -o ,help -f raw x 1"] {
        tools.same(line);
    }
}

#[test]
fn progress_is_shown_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 a.qcow2 128M");
    tools.io("a.qcow2", &["write 0 1M", "write 2M 1M", "write 4M 1M", "write 32M 1M"]);
    for line in [
        "convert -p -O raw a.qcow2 b.raw",
        "convert -p -O qcow2 a.qcow2 b.qcow2",
        "convert -p -q -O qcow2 a.qcow2 b.qcow2",
        "compare -p -q a.qcow2 b.qcow2",
    ] {
        tools.same(line);
    }
    let said = text(&tools.ours("compare -p a.qcow2 b.qcow2").stdout);
    assert!(said.starts_with("    (0.00/100%)\r") && said.ends_with("identical.\n\n"), "{said}");
    tools.made("create -q -f qcow2 -b a.qcow2 -F qcow2 over.qcow2");
    for line in ["commit -p -d over.qcow2", "rebase -p -b b.qcow2 -F qcow2 over.qcow2"] {
        let said = text(&tools.ours(line).stdout);
        let shown = "    (0.00/100%)\r    (100.00/100%)\r\n";
        assert!(said.starts_with(shown), "{line}: {said}");
    }
}

#[test]
fn without_detection_of_zeroes_everything_is_data() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 a.qcow2 5M");
    tools.io("a.qcow2", &["write -P 1 1M 64k", "write -z 2M 64k"]);
    for format in ["raw", "qcow2"] {
        let done = tools.ours(&format!("convert -S 0 -O {format} a.qcow2 full.{format}"));
        assert!(done.status.success(), "{}", text(&done.stderr));
        tools.made(&format!("compare -F {format} a.qcow2 full.{format}"));
        let map =
            text(&tools.theirs(&format!("map --output=json -f {format} full.{format}")).stdout);
        assert!(!map.contains("\"data\": false") && !map.contains("\"zero\": true"), "{map}");
    }
}

#[test]
fn bitmaps_are_copied_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 a.qcow2 4M");
    tools.made("bitmap --add -g 128k a.qcow2 one");
    tools.made("bitmap --add a.qcow2 two");
    tools.io("a.qcow2", &["write 1M 64k"]);
    tools.made("bitmap --disable a.qcow2 one");
    let shown = |line: &str| {
        let said = text(&tools.theirs(line).stdout);
        said.split_once("bitmaps:")
            .map(|(_, rest)| rest.split_once("refcount bits").unwrap().0.to_string())
    };
    for more in ["", "-c"] {
        let done = tools.ours(&format!("convert --bitmaps {more} -O qcow2 a.qcow2 b.qcow2"));
        assert!(done.status.success(), "{}", text(&done.stderr));
        assert_eq!(shown("info b.qcow2"), shown("info a.qcow2"), "{more}");
        assert!(shown("info b.qcow2").is_some_and(|all| all.contains("two")));
        tools.made("check -q b.qcow2");
        tools.made("compare a.qcow2 b.qcow2");
    }
    let served = |image: &str| {
        let nbd = PeerProgram::require("qemu-nbd")?;
        let info = PeerProgram::require("nbdinfo")?;
        let socket = tools.scratch.socket(&format!("{image}.sock"));
        let path = tools.scratch.file(image);
        let args = ["-r", "-f", "qcow2", "-B", "one", path.to_str().unwrap()];
        let server = PeerServer::qemu_nbd(&nbd, &socket, &args).unwrap();
        let line = format!("--map=qemu:dirty-bitmap:one {}", server.uri(""));
        Some(text(&tools.output(info.command(), &line).stdout))
    };
    assert_eq!(served("b.qcow2"), served("a.qcow2"));
    // QEMU's program leaves them in use when it is killed.
    let mut killed = tools.io.command();
    killed.args(["-c", "write 0 64k", "-c", "abort"]);
    tools.output(killed, "a.qcow2");
    for line in [
        "convert --bitmaps -O qcow2 a.qcow2 c.qcow2",
        "convert --bitmaps -O raw a.qcow2 c.raw",
        "convert --skip-broken-bitmaps -O qcow2 a.qcow2 c.qcow2",
    ] {
        tools.same(line);
        assert!(!tools.scratch.file("c.qcow2").exists() && !tools.scratch.file("c.raw").exists());
    }
    let line = "convert --bitmaps --skip-broken-bitmaps -O qcow2 a.qcow2 c.qcow2";
    let done = tools.ours(line);
    assert!(done.status.success() && text(&done.stderr).lines().count() == 2, "{done:?}");
    assert_eq!(shown("info c.qcow2"), None);
}

#[test]
fn contexts_of_servers_are_mapped_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    let Some(nbd) = PeerProgram::require("qemu-nbd") else { return };
    tools.made("create -q -f qcow2 a.qcow2 4M");
    tools.made("bitmap --add a.qcow2 one");
    tools.io("a.qcow2", &["write 1M 64k"]);
    tools.made("create -q -f qcow2 -b a.qcow2 -F qcow2 over.qcow2");
    tools.io("over.qcow2", &["write 2M 64k"]);
    let socket = tools.scratch.socket("s");
    let image = tools.scratch.file("over.qcow2");
    let args = ["-t", "-r", "-A", "-f", "qcow2", "-B", "one", image.to_str().unwrap()];
    let _server = PeerServer::qemu_nbd(&nbd, &socket, &args).unwrap();
    let node = format!("driver=nbd,path={},x-dirty-bitmap=qemu", socket.display());
    for context in ["allocation-depth", "dirty-bitmap:one", "dirty-bitmap:none"] {
        tools.same(&format!("map --output=json --image-opts {node}:{context}"));
    }
    let said = tools.ours(&format!("info --image-opts {node}:allocation-depth"));
    assert!(text(&said.stderr).contains("only supported by qemu-img map"), "{said:?}");
}

#[test]
fn the_first_bytes_of_an_export_tell_its_format() {
    let Some(tools) = Tools::find() else { return };
    let Some(nbd) = PeerProgram::require("qemu-nbd") else { return };
    images(&tools);
    tools.made("convert -O vdi a.qcow2 a.vdi");
    for (image, format) in [("a.qcow2", "qcow2"), ("a.raw", "raw"), ("a.vdi", "vdi")] {
        let place = tools.scratch.file(image);
        let place = place.to_str().unwrap();
        let socket = tools.scratch.socket("s");
        let server =
            PeerServer::qemu_nbd(&nbd, &socket, &["-t", "-r", "-f", "raw", "-x", "disk", place])
                .unwrap();
        let uri = server.uri("disk");
        if format != "vdi" {
            // Details of these are not known here.
            for output in ["human", "json"] {
                tools.same(&format!("info --output={output} {uri}"));
            }
            tools.same(&format!("map --output=json {uri}"));
            tools.same(&format!("check {uri}"));
        }
        tools.same(&format!("compare {uri} -F {format} {image}"));
        tools.same(&format!("measure -O raw {uri}"));
        tools.same(&format!("info -f raw --output=json {uri}"));
        drop(server);
        // One connection is enough: this server ends with it.
        for line in ["info", "map", "compare -F FORMAT IMAGE", "convert -O raw"] {
            let _ = std::fs::remove_file(&socket);
            let mut command = nbd.tied_command();
            command.args(["-r", "-f", "raw", "-x", "disk", place, "-k"]).arg(&socket);
            let server = PeerServer::start(command, &socket).unwrap();
            let target = if line.starts_with("convert") { "copy.raw" } else { "" };
            let line = line.replace("FORMAT", format).replace("IMAGE", image);
            let line = format!("{line} {} {target}", server.uri("disk"));
            // Details of these are not known here.
            if format != "vdi" || line.starts_with("co") {
                let done = tools.ours(&line);
                assert!(done.status.success(), "{line}: {}", text(&done.stderr));
            }
        }
        tools.made(&format!("compare -f raw -F {format} copy.raw {image}"));
    }
}

#[test]
fn images_are_written_compressed() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    tools.made("create -q -f qcow2 there.qcow2 10M");
    tools.made("create -q -f qcow2 -b a.qcow2 -F qcow2 flat.qcow2");
    tools.io("flat.qcow2", &["write -P 9 3M 64k"]);
    for line in [
        "convert -c -O qcow2 -B a.raw -F raw over.qcow2 delta.qcow2",
        "convert -c -O qcow2 -o compat=0.10 over.qcow2 old.qcow2",
        "convert -c -O qcow2 -o extended_l2=on,compression_type=zstd over.qcow2 parts.qcow2",
        "convert -c -n -O qcow2 over.qcow2 there.qcow2",
        "rebase -c -b  flat.qcow2",
    ] {
        let done = match line {
            "rebase -c -b  flat.qcow2" => {
                let mut command = Command::new(OURS);
                command.args(["compat", "qemu-img", "rebase", "-c", "-b", ""]);
                tools.output(command, "flat.qcow2")
            }
            _ => tools.ours(line),
        };
        assert!(done.status.success(), "{line}: {}", text(&done.stderr));
        let image = line.split(' ').next_back().unwrap();
        tools.made(&format!("compare over.qcow2 {image}"));
        let found = text(&tools.theirs(&format!("check --output=json {image}")).stdout);
        let found: serde_json::Value = serde_json::from_str(&found).unwrap();
        let count = found["compressed-clusters"].as_u64().unwrap_or(0);
        assert!(count >= 2 && found.get("leaks").is_none(), "{line}: {found}");
    }
    for line in ["convert -c -n -O raw a.qcow2 a.raw", "rebase -c -f raw -b a.raw -F raw a.raw"] {
        let said = text(&tools.ours(line).stderr);
        assert!(said.contains("Compression not supported for this file format"), "{line}: {said}");
    }
}

#[test]
fn overlays_are_committed_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    for name in ["a", "b"] {
        std::fs::copy(
            tools.scratch.file("a.qcow2"),
            tools.scratch.file(&format!("{name}-base.qcow2")),
        )
        .unwrap();
        tools.made(&format!(
            "create -q -f qcow2 -b {name}-base.qcow2 -F qcow2 {name}-top.qcow2 14M"
        ));
        tools.io(
            &format!("{name}-top.qcow2"),
            &["write -P 9 3M 64k", "write -z 1M 64k", "write -P 4 13M 64k"],
        );
    }
    tools.made("convert -q -O qcow2 a-top.qcow2 whole.qcow2");
    for option in ["-d", ""] {
        let theirs = tools.theirs(&format!("commit {option} a-top.qcow2"));
        let ours = tools.ours(&format!("commit {option} b-top.qcow2"));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{option}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{option}");
        for image in ["b-base.qcow2", "b-top.qcow2"] {
            tools.made(&format!("compare whole.qcow2 {image}"));
            tools.made(&format!("check -q {image}"));
        }
    }
    tools.same("commit missing");
    tools.same("commit a.qcow2");
    tools.same("commit -f raw a.raw");
}

/// The original says nothing. Our own commands refuse such an image.
#[test]
fn snapshots_that_change_with_the_backing_file_are_warned_of() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 base 1M");
    tools.made("create -q -f qcow2 -b base -F qcow2 top");
    tools.made("snapshot -c monday top");
    tools.io("top", &["write -P 9 0 64k"]);
    let path = tools.scratch.file("top");
    for options in [&["rebase", "--flatten"][..], &["commit", "--keep"]] {
        let command = |more: &[&str]| {
            let mut command = Command::new(OURS);
            command.args(options).args(["--backing", "allow"]).args(more).arg(&path);
            tools::output(&mut command, LIMIT).unwrap()
        };
        let refused = command(&[]);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(3), "{said}");
        for part in [&format!("cannot {} ", options[0]), "--change-snapshots"] {
            assert!(said.contains(part), "{said}");
        }
        if options[0] == "commit" {
            let accepted = command(&["--change-snapshots"]);
            assert!(accepted.status.success(), "{}", text(&accepted.stderr));
        }
    }
    for line in ["commit -d top", "rebase -u -b base -F qcow2 top"] {
        let ours = tools.ours(line);
        let said = text(&ours.stderr);
        assert!(ours.status.success(), "{line}: {said}");
        assert_eq!(said.matches("internal snapshots (1)").count(), 1, "{line}: {said}");
    }
}

#[test]
fn faults_are_named_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 start 4M");
    tools.io("start", &["write 0 256k"]);
    let mut bytes = tools.bytes("start");
    let word = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00
    };
    let l1 = word(&bytes, 40) as usize;
    let l2 = word(&bytes, l1) as usize;
    let table = word(&bytes, 48) as usize;
    let block = word(&bytes, table) as usize;
    let cluster = |bytes: &[u8], number: usize| word(bytes, l2 + number * 8) as usize >> 16;
    let [second, third] = [1, 2].map(|number| cluster(&bytes, number));
    // A lost cluster, a refcount that is too high, and one that is too low.
    bytes[l2..l2 + 8].fill(0);
    bytes[block + second * 2 + 1] = 2;
    let leaks = bytes.clone();
    bytes[l2 + 24..l2 + 32].copy_from_slice(&leaks[l2 + 16..l2 + 24]);
    bytes[block + third * 2 + 1] = 1;
    for (label, bytes) in [("leaks", leaks), ("errors", bytes)] {
        for option in ["", "-r leaks", "-r all"] {
            std::fs::write(tools.scratch.file("bad"), &bytes).unwrap();
            let theirs = tools.theirs(&format!("check {option} bad"));
            std::fs::write(tools.scratch.file("bad"), &bytes).unwrap();
            let ours = tools.ours(&format!("check {option} bad"));
            let label = format!("{label} {option}");
            if label != "errors -r leaks" {
                assert_eq!(text(&ours.stderr), text(&theirs.stderr), "{label}");
                assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{label}");
            }
            assert_eq!(ours.status.code(), theirs.status.code(), "{label}");
            if option == "-r all" {
                tools.made("check -q bad");
            }
        }
    }
}

#[test]
fn images_further_down_are_committed_to() {
    let Some(tools) = Tools::find() else { return };
    for name in ["a", "b"] {
        tools.made(&format!("create -q -f qcow2 {name}0 8M"));
        tools.made(&format!("create -q -f qcow2 -b {name}0 -F qcow2 {name}1"));
        tools.made(&format!("create -q -f qcow2 -b {name}1 -F qcow2 {name}2"));
        tools.io(&format!("{name}0"), &["write -P 1 0 2M"]);
        tools.io(&format!("{name}1"), &["write -P 2 1M 2M"]);
        tools.io(&format!("{name}2"), &["write -P 3 2M 2M"]);
    }
    tools.made("convert -q -O qcow2 b2 whole");
    for line in ["commit -b N0 N2", "commit -b none N2", "commit -b N2 N2", "commit -b N1 N2"] {
        let theirs = tools.theirs(&line.replace('N', "a"));
        let ours = tools.ours(&line.replace('N', "b"));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
    }
    for image in ["b0", "b1", "b2"] {
        tools.made(&format!("compare whole {image}"));
        tools.made(&format!("check -q {image}"));
    }
}

#[test]
fn snapshots_are_made_applied_and_deleted() {
    let Some(tools) = Tools::find() else { return };
    for name in ["a", "b"] {
        tools.made(&format!("create -q -f qcow2 {name} 4M"));
        tools.io(name, &["write -P 1 0 1M"]);
    }
    let both = |line: &str| {
        let theirs = tools.theirs(&line.replace('N', "a"));
        let ours = tools.ours(&line.replace('N', "b"));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
    };
    both("snapshot -c one N");
    for name in ["a", "b"] {
        tools.io(name, &["write -P 2 512k 1M"]);
    }
    for line in [
        "snapshot -c two N",
        "snapshot -a one N",
        "snapshot -a none N",
        "snapshot -d none N",
        "snapshot -a 2 N",
        "snapshot -d one N",
        "snapshot -a one -d one N",
        "snapshot N",
    ] {
        if line == "snapshot N" {
            let shown = text(&tools.ours("snapshot b").stdout);
            assert!(shown.contains("two") && !shown.contains("one"), "{shown}");
            continue;
        }
        both(line);
        tools.made("compare a b");
        tools.made("check -q b");
    }
    tools.made("create -q -f raw raw 1M");
    tools.same("snapshot -f raw -c one raw");
}

#[test]
fn parts_of_disks_are_copied_by_dd() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    for format in ["raw", "qcow2"] {
        for part in ["", "bs=1M count=3", "bs=4k skip=3", "bs=1M count=4 skip=2", "bs=1M skip=99"] {
            let line = format!("dd -O {format} {part} if=over.qcow2");
            let theirs = tools.theirs(&format!("{line} of=theirs"));
            let ours = tools.ours(&format!("{line} of=ours"));
            assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
            assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}");
            tools.same_disks(format, "theirs", "ours");
        }
    }
    tools.same("dd if=over.qcow2");
    tools.same("dd if=over.qcow2 of=x bs=0");
    tools.same("dd if=over.qcow2 of=x what=1");
    tools.same("dd -O what if=over.qcow2 of=x");
}

#[test]
fn new_images_have_the_options_of_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    for options in [
        "compat=0.10",
        "compat=v3,refcount_bits=1",
        "refcount_bits=64,cluster_size=512",
        "lazy_refcounts=on",
        "compression_type=zstd",
        "extended_l2=on",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "preallocation=off,compat=0.10",
    ] {
        let line = format!("create -f qcow2 -o {options}");
        let theirs = tools.theirs(&format!("{line} theirs 3M"));
        let ours = tools.ours(&format!("{line} ours 3M"));
        let said = text(&ours.stdout).replace("ours", "theirs");
        assert_eq!(said, text(&theirs.stdout), "{options}: {}", text(&ours.stderr));
        tools.made("check -q ours");
        let [one, other] = ["theirs", "ours"].map(|image| {
            let shown = text(&tools.theirs(&format!("info {image}")).stdout);
            let lines =
                shown.lines().filter(|line| !line.contains(image) && !line.contains("disk size"));
            lines.map(str::to_string).collect::<Vec<_>>()
        });
        assert_eq!(one, other, "{options}");
        // Both may use other places.
        let map = |image: &str| -> Vec<String> {
            let shown = text(&tools.theirs(&format!("map --output=json {image}")).stdout);
            let state = |line: &str| line.split(", \"offset\"").next().unwrap().to_string();
            shown.lines().map(state).collect()
        };
        assert_eq!(map("theirs"), map("ours"), "{options}");
    }
    for options in [
        "compat=1.2",
        "compat=0.10,refcount_bits=8",
        "compat=0.10,lazy_refcounts=on",
        "compat=0.10,extended_l2=on",
        "compat=0.10,compression_type=zstd",
        "refcount_bits=3",
        "cluster_size=1000",
        "preallocation=some",
        "compression_type=some",
        "data_file_raw=on",
    ] {
        tools.same(&format!("create -f qcow2 -o {options} wrong 3M"));
    }
    tools.same("create -f qcow2 wrong 1E");
    for (mode, size) in [("off", "4M"), ("metadata", "6M"), ("falloc", "8M"), ("full", "10M")] {
        tools.made("create -q -f qcow2 theirs 3M");
        tools.made("create -q -f qcow2 ours 3M");
        let theirs = tools.theirs(&format!("resize --preallocation={mode} theirs {size}"));
        let ours = tools.ours(&format!("resize --preallocation={mode} ours {size}"));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{mode}: {}", text(&ours.stderr));
        tools.made("check -q ours");
        tools.made("compare theirs ours");
    }
    tools.same("resize --preallocation=full ours -1M");
    tools.same("resize --preallocation=full ours 1M");
    tools.same("create -f raw -o preallocation=full full 2M");
    assert!(std::fs::metadata(tools.scratch.file("full")).unwrap().blocks() >= 4096);
}

#[test]
fn bitmaps_are_changed_as_by_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    for name in ["a", "b"] {
        let image = format!("{name}.qcow2");
        tools.made(&format!("create -q -f qcow2 {image} 4M"));
        tools.made(&format!("bitmap --add {image} one"));
        tools.io(&image, &["write 0 64k", "write 2M 64k"]);
        tools.made(&format!("bitmap --disable {image} one"));
        tools.made(&format!("create -q -f qcow2 {name}-other.qcow2 4M"));
        tools.made(&format!("bitmap --add {name}-other.qcow2 far"));
        tools.io(&format!("{name}-other.qcow2"), &["write 3M 64k"]);
    }
    for line in [
        "--add --merge one A.qcow2 sum",
        "--merge far -b A-other.qcow2 -F qcow2 A.qcow2 sum",
        "--add --disable -g 128k A.qcow2 coarse",
        "--add --clear --disable A.qcow2 two",
        "--enable A.qcow2 two",
        "--remove A.qcow2 two",
        "--remove A.qcow2 none",
        "--add A.qcow2 one",
        "--merge none A.qcow2 sum",
    ] {
        let theirs = tools.theirs(&format!("bitmap {}", line.replace('A', "a")));
        let ours = tools.ours(&format!("bitmap {}", line.replace('A', "b")));
        assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{line}: {}", text(&ours.stderr));
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {}", text(&ours.stderr));
    }
    tools.made("check -q b.qcow2");
    // QEMU lists the same bitmaps of both, and the same parts of the disk as dirty.
    let [a, b] = ["a", "b"].map(|name| {
        let shown = text(&tools.theirs(&format!("info {name}.qcow2")).stdout);
        let (_, bitmaps) = shown.split_once("bitmaps:").unwrap();
        bitmaps.split_once("refcount bits").unwrap().0.to_string()
    });
    assert_eq!(a, b);
    let Some(nbd) = PeerProgram::require("qemu-nbd") else { return };
    let Some(info) = PeerProgram::require("nbdinfo") else { return };
    let [a, b] = ["a", "b"].map(|name| {
        let socket = tools.scratch.socket(name);
        let image = tools.scratch.file(&format!("{name}.qcow2"));
        let args = ["-r", "-f", "qcow2", "-B", "sum", image.to_str().unwrap()];
        let server = PeerServer::qemu_nbd(&nbd, &socket, &args).unwrap();
        let map = tools
            .output(info.command(), &format!("--map=qemu:dirty-bitmap:sum {}", server.uri("")));
        assert!(map.status.success(), "{}", text(&map.stderr));
        text(&map.stdout)
    });
    assert_eq!(a, b);
    assert!(a.contains("dirty"), "{a}");
}

#[test]
fn all_bitmaps_are_removed_at_once() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -f qcow2 a.qcow2 8M");
    tools.made("create -f raw a.raw 8M");
    for name in ["one", "two"] {
        tools.made(&format!("bitmap --add a.qcow2 {name}"));
    }
    let done = tools.ours("bitmap --remove-all --add -g 128k a.qcow2 three");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let shown = text(&tools.theirs("info a.qcow2").stdout);
    assert!(shown.contains("granularity: 131072") && !shown.contains("name: one"), "{shown}");
    for image in ["a.qcow2", "a.raw"] {
        assert!(tools.ours(&format!("bitmap --remove-all {image}")).status.success(), "{image}");
    }
    assert!(!text(&tools.theirs("info a.qcow2").stdout).contains("bitmaps"));
    let done = tools.ours("bitmap --remove-all a.qcow2 three");
    assert!(text(&done.stderr).contains("Unexpected argument: three"), "{}", text(&done.stderr));
    tools.made("check a.qcow2");
}

#[test]
fn images_are_named_in_every_way_that_qemu_img_knows() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    let node = "driver=qcow2,file.driver=file,file.filename=over.qcow2";
    let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"over.qcow2"}}"#;
    for command in ["map --output=json", "check --output=json -U", "measure --output=json -O qcow2"]
    {
        let [theirs, ours] = [
            tools.theirs(&format!("{command} --image-opts {node}")),
            tools.ours(&format!("{command} --image-opts {node}")),
        ];
        assert_eq!(ours.status.code(), theirs.status.code(), "{command}: {}", text(&ours.stderr));
        if !command.starts_with("check") {
            assert_eq!(text(&ours.stdout), text(&theirs.stdout), "{command}");
            tools.same(&format!("{command} {json}"));
        }
    }
    tools.same(&format!(
        "compare --image-opts {node} driver=qcow2,file.driver=file,file.filename=a.qcow2"
    ));
    tools.same(&format!("compare {json} over.qcow2"));
    tools.same("info --image-opts driver=qcow2,file.driver=file");
    tools.same("info --image-opts driver=nonsense,file.filename=a.raw");
    let Some(nbd) = PeerProgram::require("qemu-nbd") else { return };
    let socket = tools.scratch.socket("s");
    let image = tools.scratch.file("over.qcow2");
    let args = ["-r", "-e", "8", "-f", "qcow2", "-x", "disk", image.to_str().unwrap()];
    let server = PeerServer::qemu_nbd(&nbd, &socket, &args).unwrap();
    let legacy = format!("nbd:unix:{}:exportname=disk", socket.display());
    let of_node = format!(
        "--image-opts driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.export=disk",
        socket.display()
    );
    for name in [server.uri("disk"), legacy, of_node] {
        tools.made("convert -q -O raw over.qcow2 over.raw");
        let done = tools.ours(&format!("convert -O raw {name} copy.raw"));
        assert!(done.status.success(), "{name}: {}", text(&done.stderr));
        assert!(tools.bytes("copy.raw") == tools.bytes("over.raw"), "{name}");
        if !name.starts_with('-') {
            tools.same(&format!("compare -F qcow2 {name} over.qcow2"));
        }
    }
}

#[test]
fn several_sources_become_one_disk() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    std::fs::copy(tools.scratch.file("a.qcow2"), tools.scratch.file("a,%.qcow2")).unwrap();
    for format in ["raw", "qcow2"] {
        let line = format!("convert -O {format} over.qcow2 a,%.qcow2 over.qcow2");
        let theirs = tools.theirs(&format!("{line} theirs"));
        let ours = tools.ours(&format!("{line} ours"));
        assert_eq!(ours.status.code(), theirs.status.code(), "{format}: {}", text(&ours.stderr));
        tools.same_disks(format, "theirs", "ours");
    }
    tools.same("convert -O qcow2 -B a.qcow2 -F qcow2 over.qcow2 a.qcow2 both");
}

#[test]
fn overlays_of_another_disk_have_what_differs() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    for (source, backing) in
        [("over.qcow2", "a.qcow2"), ("a.raw", "a.qcow2"), ("a.qcow2", "over.qcow2")]
    {
        let line = format!("convert -O qcow2 -B {backing} -F qcow2 {source} made");
        let ours = tools.ours(&line);
        assert!(ours.status.success(), "{line}: {}", text(&ours.stderr));
        tools.made(&format!("compare {source} made"));
        tools.made("check -q made");
    }
    // Both disks are the same: nothing is written.
    let done = tools.ours("convert -O qcow2 -B a.qcow2 -F qcow2 a.qcow2 same");
    assert!(done.status.success(), "{}", text(&done.stderr));
    let map = text(&tools.theirs("map --output=json same").stdout);
    assert!(!map.contains("\"depth\": 0, \"present\": true"), "{map}");
}

#[test]
fn existing_targets_are_written_in_place() {
    let Some(tools) = Tools::find() else { return };
    images(&tools);
    for (format, size) in [("raw", "10M"), ("qcow2", "10M"), ("raw", "12M")] {
        for quirk in ["", "-W -m 2"] {
            tools.made(&format!("create -q -f {format} target {size}"));
            tools.io(&format!("-f {format} target"), &["write -P 99 0 10M"]);
            let inode = std::fs::metadata(tools.scratch.file("target")).unwrap().ino();
            let done = tools.ours(&format!("convert -n {quirk} -O {format} over.qcow2 target"));
            assert!(done.status.success(), "{format}: {}", text(&done.stderr));
            tools.made(&format!("compare -F {format} over.qcow2 target"));
            let after = std::fs::metadata(tools.scratch.file("target")).unwrap().ino();
            assert_eq!(inode, after, "{format}");
        }
    }
    tools.made("create -q -f raw small 1M");
    tools.same("convert -n -O raw over.qcow2 small");
    tools.same("convert -n -O raw over.qcow2 none");
}

#[test]
fn backing_files_named_in_json_are_those_of_qemu_img() {
    let Some(tools) = Tools::find() else { return };
    tools.made("create -q -f qcow2 b.qcow2 4M");
    tools.io("b.qcow2", &["write -P 7 0 1M"]);
    tools.made("convert -O raw b.qcow2 b.raw");
    let raw = tools.scratch.file("b.raw");
    let server = PeerServer::blockhaul(
        OURS.as_ref(),
        &tools.scratch.socket("s"),
        &["-r", raw.to_str().unwrap()],
    );
    let server = server.unwrap();
    let (raw, socket) = (raw.display(), server.socket().display());
    let names = [
        // Within JSON a relative path begins at the directory of the process.
        (
            r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"b.qcow2"}}"#.to_string(),
            "qcow2",
        ),
        (format!("json:{{'driver':'raw','node-name':'n','file.filename':'{raw}'}}"), "raw"),
        (format!(r#"json:{{"driver":"file","filename":"{raw}","locking":"off"}}"#), "file"),
        (format!(r#"json:{{"driver":"nbd","server":{{"type":"unix","path":"{socket}"}}}}"#), "nbd"),
        (
            format!(
                r#"json:{{"driver":"raw","file":{{"driver":"nbd","server.type":"unix","server.path":"{socket}","export":""}}}}"#
            ),
            "raw",
        ),
    ];
    for (name, format) in &names {
        tools.made(&format!("create -q -f qcow2 -b {name} -F {format} top 4M"));
        tools.io("top", &["write -P 9 64k 64k"]);
        for output in ["human", "json"] {
            tools.same(&format!("info --output={output} --backing-chain top"));
            tools.same(&format!("map --output={output} top"));
            tools.same(&format!("measure --output={output} -O qcow2 top"));
        }
        tools.same("check top");
        let done = tools.ours("convert -O raw top ours.raw");
        assert!(done.status.success(), "{name}: {}", text(&done.stderr));
        tools.made("convert -O raw top theirs.raw");
        assert!(tools.bytes("ours.raw") == tools.bytes("theirs.raw"), "{name}");
        // Made, given to an image, and taken away by ours.
        for line in [
            &format!("create -q -f qcow2 -b {name} -F {format} new"),
            "rebase -b b.raw -F raw new",
            &format!("rebase -b {name} -F {format} new"),
            &format!("rebase -u -b {name} -F {format} new"),
        ] {
            let done = tools.ours(line);
            assert!(done.status.success(), "{line}: {}", text(&done.stderr));
            tools.same_disks("qcow2", "new", "b.qcow2");
        }
        tools.same("info --backing-chain new");
    }
    // The changes of an overlay reach the file in the name.
    let name = &names[0].0;
    tools.made(&format!("create -q -f qcow2 -b {name} -F qcow2 top"));
    tools.io("top", &["write -P 9 64k 64k"]);
    tools.same("commit top");
    tools.made("compare b.qcow2 theirs.raw");
    // In another directory the relative name is that of no file, for both.
    let folder = tools.scratch.file("sub");
    std::fs::create_dir(&folder).unwrap();
    std::fs::rename(tools.scratch.file("top"), folder.join("top")).unwrap();
    std::fs::rename(tools.scratch.file("b.qcow2"), folder.join("b.qcow2")).unwrap();
    for done in [tools.theirs("map sub/top"), tools.ours("map sub/top")] {
        assert_eq!(done.status.code(), Some(1));
        assert!(text(&done.stderr).contains("b.qcow2"), "{}", text(&done.stderr));
    }
    tools.made(r#"create -q -u -f qcow2 -b json:{"driver":"rbd","pool":"p"} -F raw top 4M"#);
    let refused = tools.ours("map top");
    assert!(!refused.status.success() && text(&refused.stderr).contains("'rbd'"));
}
