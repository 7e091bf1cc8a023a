//! A small guest: Debian's kernel, busybox, and a shell on the serial line, which is a Unix socket.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockhaul_testkit::tools::until_ok;

use super::Root;

/// What the initial program prints before its shell begins.
const READY: &str = "GUEST-READY";

/// Command line of the kernel.
pub const KERNEL_ARGUMENTS: &str = "console=ttyS0 quiet loglevel=1 panic=-1 edd=off tsc=unstable";

/// First program of the guest.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
export PATH=/opt:/bin:/sbin HOME=/
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
for module in failover net_failover virtio_net virtio_blk; do insmod /modules/$module.ko 2>/dev/null; done
ifconfig lo 127.0.0.1
stty -echo
echo GUEST-READY
PS1= exec setsid cttyhack sh
";

/// Packs programs, their libraries and modules of the kernel: arguments are the directory and the modules.
const PACK: &str = r#"set -eu
out=$1; shift
tree=$out/tree
kernel=$(ls /lib/modules | tail -1)
mkdir -p "$tree/bin" "$tree/opt" "$tree/modules" "$tree/mnt" "$tree/etc"
cp /bin/busybox "$tree/bin/"
ln -s /proc/mounts "$tree/etc/mtab"
for module; do
    file=/lib/modules/$kernel/kernel/$module.ko.xz
    [ ! -e "$file" ] || xz -dc "$file" > "$tree/modules/$(basename "$module").ko"
done
for program in /usr/sbin/nbd-client /usr/sbin/mke2fs /usr/sbin/e2fsck /usr/bin/fio; do
    cp -L "$program" "$tree/opt/"
    ldd "$program" | grep -o '/[^ ]*' | while read -r library; do
        mkdir -p "$tree/$(dirname "$library")"
        cp -L "$library" "$tree/$library"
    done
done
ln -s mke2fs "$tree/opt/mkfs.ext4"
cp "$out/init" "$tree/init"
chmod 755 "$tree/init"
cp "/boot/vmlinuz-$kernel" "$out/vmlinuz"
cd "$tree"
find . | cpio -o -H newc --quiet | gzip -1 > "$out/initrd"
"#;

const MODULES: &[&str] = &[
    "net/core/failover",
    "drivers/net/net_failover",
    "drivers/net/virtio_net",
    "drivers/block/virtio_blk",
    "drivers/block/nbd",
];

/// Kernel and first file system of the guest.
pub struct Image {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

impl Image {
    /// Makes both in `dir`, which the root has, too.
    #[track_caller]
    pub fn make(root: &Root, dir: &Path) -> Image {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("init"), INIT).unwrap();
        let mut pack = root.command("sh");
        pack.args(["-c", PACK, "sh"]).arg(dir).args(MODULES);
        super::succeeded(&mut pack);
        Image { kernel: dir.join("vmlinuz"), initrd: dir.join("initrd") }
    }
}

/// The serial line of a guest.
pub struct Shell {
    line: UnixStream,
    commands: u32,
}

impl Shell {
    /// Connects early, as QEMU discards what nobody reads, and waits until the guest has started.
    #[track_caller]
    pub fn wait(socket: &Path) -> Shell {
        let line = until_ok("the guest has a serial line", || UnixStream::connect(socket));
        line.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut shell = Shell { line, commands: 0 };
        shell.read_until(READY, Duration::from_secs(300));
        std::thread::sleep(Duration::from_millis(500));
        shell
    }

    /// Runs a command, which has to succeed; gives its output.
    #[track_caller]
    pub fn run(&mut self, command: &str) -> String {
        let (status, printed) = self.status_of(command);
        assert!(status == 0, "{command}: status {status}: {printed}");
        printed
    }

    /// Runs a command; gives its status and its output.
    #[track_caller]
    pub fn status_of(&mut self, command: &str) -> (i32, String) {
        self.commands += 1;
        let mark = format!("END{}", self.commands);
        // The quotes keep the line of the command itself from being taken for its end.
        let line = format!("{{ {command}; }} < /dev/null; echo \"{mark}\"\"=$?=\"\n");
        self.line.write_all(line.as_bytes()).unwrap();
        let printed = self.read_until(&format!("{mark}="), super::PATIENCE);
        let status = self.read_until("=", Duration::from_secs(10));
        let printed = printed.replace('\r', "");
        (status.trim_end_matches('=').parse().unwrap(), printed.replace(&format!("{mark}="), ""))
    }

    /// Digest of a disk as the guest reads it, with nothing left in its memory.
    #[track_caller]
    pub fn digest(&mut self, disk: &str) -> String {
        let printed = self.run(&format!(
            "umount /mnt 2>/dev/null; sync; echo 3 > /proc/sys/vm/drop_caches; md5sum < {disk}"
        ));
        printed.split_whitespace().next().unwrap().into()
    }

    /// Reads up to these words, and no further.
    #[track_caller]
    fn read_until(&mut self, words: &str, limit: Duration) -> String {
        let begun = Instant::now();
        let mut seen = Vec::new();
        let mut byte = [0];
        while !seen.ends_with(words.as_bytes()) {
            assert!(begun.elapsed() < limit, "no {words} within {limit:?}: {}", text(&seen));
            match self.line.read(&mut byte) {
                Ok(0) => panic!("the guest has ended: {}", text(&seen)),
                Ok(_) => seen.push(byte[0]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
        text(&seen)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
