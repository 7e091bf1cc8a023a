package PVE::BackupProvider::Plugin::Blockhaul;

# A backup provider of Proxmox VE for virtual machines (mechanism nbd), which keeps the points of each
# volume in a directory below the path of the storage:
#
#     PATH/vm/100/drive-scsi0/            a store of `blockhaul pull`
#     PATH/vm/100/2026-11-26T22:00:00Z.conf   the configuration of the machine at that point
#
# Install it as /usr/share/perl5/PVE/BackupProvider/Plugin/Blockhaul.pm. The storage plugin returns it:
#
#     sub new_backup_provider {
#         my ($class, $scfg, $storeid, $log) = @_;
#         return PVE::BackupProvider::Plugin::Blockhaul->new($class, $scfg, $storeid, $log);
#     }

use strict;
use warnings;

use File::Path qw(make_path remove_tree);
use File::Temp qw(tempdir);
use JSON::PP qw(decode_json);
use POSIX qw(strftime);

use base qw(PVE::BackupProvider::Plugin::Base);

sub new {
    my ($class, $storage_plugin, $scfg, $storeid, $log) = @_;
    my $path = $scfg->{path} // die "storage $storeid has no path\n";
    return bless { path => $path, log => $log, servers => {} }, $class;
}

sub provider_name { return 'blockhaul' }

sub job_init { }

sub job_cleanup { }

# Backup

sub backup_get_mechanism {
    my ($self, $vmid, $vmtype) = @_;
    return $vmtype eq 'qemu' ? 'nbd' : undef;
}

sub backup_init {
    my ($self, $vmid, $vmtype, $start_time) = @_;
    my $point = strftime('%Y-%m-%dT%H:%M:%SZ', gmtime($start_time));
    $self->{point} = $point;
    return { 'archive-name' => "vm/$vmid/$point" };
}

# A bitmap can be used if the newest point of the store is of the same disk.
sub backup_vm_query_incremental {
    my ($self, $vmid, $volumes) = @_;
    my %modes;
    for my $device (keys %$volumes) {
        my $newest = $self->points($vmid, $device)->[-1];
        my $fits = $newest && $newest->{size} == $volumes->{$device}->{size};
        $modes{$device} = $fits ? 'use' : 'new';
    }
    return \%modes;
}

sub backup_vm {
    my ($self, $vmid, $guest_config, $volumes, $info) = @_;
    my $dir = $self->dir($vmid);
    make_path($dir);
    # Bytes for each second.
    my $rate = $info->{'bandwidth-limit'};
    my $job = $rate ? "rate = \"$rate\"\n" : '';
    for my $device (sort keys %$volumes) {
        my $volume = $volumes->{$device};
        my $mode = $volume->{'bitmap-mode'};
        my $store = $self->store($vmid, $device);
        # What a failed backup has copied is of a moment that is gone. Proxmox VE then gives the changes
        # since the last backup that was complete.
        $self->run('chain', 'abandon', $store) if -e "$store/unfinished.json";
        my %keys = (
            name => $device,
            source => "nbd+unix:///" . escaped($device) . '?socket=' . escaped($volume->{'nbd-path'}),
            store => $store,
            mode => $mode eq 'reuse' ? 'increment' : 'full',
        );
        $keys{checkpoint} = $volume->{'bitmap-name'} if $mode ne 'none';
        $keys{bitmap} = $volume->{'bitmap-name'} if $mode eq 'reuse';
        $job .= "[[disk]]\ndiscard-source = true\n";
        $job .= "$_ = " . quoted($keys{$_}) . "\n" for sort keys %keys;
        my $what = $mode eq 'reuse' ? 'what has changed' : "all of it (bitmap: $mode)";
        $self->{log}->('info', "$device: copying $what");
    }
    my $file = "$dir/job.toml";
    put($file, $job);
    $self->run('pull', '--no-progress', $file, '--point', $self->{point});
    # The backup is complete once its configuration is there.
    put("$dir/$self->{point}.fw", $info->{'firewall-config'}) if defined($info->{'firewall-config'});
    put("$dir/$self->{point}.conf", $guest_config);
}

sub backup_cleanup {
    my ($self, $vmid, $vmtype, $success, $info) = @_;
    return if !$success;
    my $size = 0;
    $size += $_->{stored} for values %{ $self->volumes($vmid, $self->{point}) };
    return { stats => { 'archive-size' => $size } };
}

sub backup_handle_log_file {
    my ($self, $vmid, $filename) = @_;
    open(my $log, '<', $filename) or die "cannot read $filename: $!\n";
    local $/;
    put($self->dir($vmid) . "/$self->{point}.log", scalar(<$log>));
}

# Restore

sub restore_get_mechanism { return ('qemu-img', 'qemu') }

sub archive_get_guest_config {
    my ($self, $volname) = @_;
    return get($self->archive($volname) . '.conf') // die "$volname: no such backup\n";
}

sub archive_get_firewall_config {
    my ($self, $volname) = @_;
    return get($self->archive($volname) . '.fw');
}

sub restore_vm_init {
    my ($self, $volname) = @_;
    my ($vmid, $point) = parts($volname);
    my $volumes = $self->volumes($vmid, $point);
    $self->{run} = tempdir('blockhaul-XXXXXX', TMPDIR => 1);
    return { map { $_ => { size => $volumes->{$_}->{size} } } keys %$volumes };
}

# Each volume gets a server of its own: qemu-img reads the point from there.
sub restore_vm_volume_init {
    my ($self, $volname, $device, $info) = @_;
    my ($vmid, $point) = parts($volname);
    my $name = "$self->{run}/" . keys(%{ $self->{servers} });
    my $store = $self->store($vmid, $device);
    $self->{servers}->{$device} = $name;
    $self->run(
        'serve', '--readonly', '--background', '--pidfile', "$name.pid", '-U', "$name.sock",
        "backup:$store?point=$point",
    );
    return { 'qemu-img-path' => "nbd+unix:///?socket=$name.sock" };
}

sub restore_vm_volume_cleanup {
    my ($self, $volname, $device, $info) = @_;
    my $name = delete($self->{servers}->{$device}) // return;
    my ($pid) = (get("$name.pid") // '') =~ m/^(\d+)/ or return;
    kill('TERM', $pid);
    # The server removes the file when it ends.
    for (1 .. 200) {
        last if !-e "$name.pid";
        select(undef, undef, undef, 0.05);
    }
}

sub restore_vm_cleanup {
    my ($self, $volname) = @_;
    $self->restore_vm_volume_cleanup($volname, $_) for keys %{ $self->{servers} };
    remove_tree(delete($self->{run})) if $self->{run};
}

# Helpers

sub dir { return "$_[0]->{path}/vm/$_[1]" }

sub store {
    my ($self, $vmid, $device) = @_;
    die "device name $device\n" if $device !~ m/^[\w.-]+$/ || $device =~ m/^\./;
    return $self->dir($vmid) . "/$device";
}

# The machine and the point of an archive.
sub parts {
    my ($volname) = @_;
    my ($vmid, $point) = $volname =~ m!(?:^|/)vm/(\d+)/([\w.:-]+)$! or die "$volname: no backup of blockhaul\n";
    return ($vmid, $point);
}

sub archive {
    my ($self, $volname) = @_;
    my ($vmid, $point) = parts($volname);
    return $self->dir($vmid) . "/$point";
}

# The points of a volume, the oldest first.
sub points {
    my ($self, $vmid, $device) = @_;
    my $store = $self->store($vmid, $device);
    return [] if !-e "$store/manifest.json";
    return decode_json(join('', $self->run('chain', 'list', '--json', $store)))->{points};
}

# The volumes that have this point.
sub volumes {
    my ($self, $vmid, $point) = @_;
    my %found;
    for my $manifest (glob($self->dir($vmid) . '/*/manifest.json')) {
        my ($device) = $manifest =~ m!([^/]+)/manifest\.json$!;
        my ($there) = grep { $_->{name} eq $point } @{ $self->points($vmid, $device) };
        $found{$device} = $there if $there;
    }
    return \%found;
}

# Runs blockhaul; what it prints goes to the log of the task, except JSON, which is returned.
sub run {
    my ($self, @args) = @_;
    my $is_json = grep { $_ eq '--json' } @args;
    my $pid = open(my $pipe, '-|') // die "cannot fork: $!\n";
    if (!$pid) {
        open(STDERR, '>&', \*STDOUT) if !$is_json;
        exec('blockhaul', @args) or POSIX::_exit(127);
    }
    my @lines = <$pipe>;
    my $is_done = close($pipe);
    my $status = $? >> 8;
    chomp(@lines);
    if (!$is_json) {
        $self->{log}->($is_done ? 'info' : 'err', $_) for @lines;
    }
    die "blockhaul $args[0] failed with status $status: " . ($lines[-1] // '') . "\n" if !$is_done;
    return @lines;
}

sub escaped {
    my ($text) = @_;
    $text =~ s!([^\w./-])!sprintf('%%%02X', ord($1))!ge;
    return $text;
}

# A string of TOML.
sub quoted {
    my ($text) = @_;
    $text =~ s/([\\"])/\\$1/g;
    return "\"$text\"";
}

sub put {
    my ($path, $text) = @_;
    open(my $file, '>', "$path.new") or die "cannot write $path: $!\n";
    (print {$file} $text) && close($file) or die "cannot write $path: $!\n";
    rename("$path.new", $path) or die "cannot write $path: $!\n";
}

sub get {
    my ($path) = @_;
    open(my $file, '<', $path) or return undef;
    local $/;
    return scalar(<$file>);
}

1;
