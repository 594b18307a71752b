//! Reads how much more memory this process may allocate and pin. The limits come from the machine, from the cgroups of
//! the process, and from `RLIMIT_MEMLOCK`.
//!
//! `Region` reads the limits before it populates memory. If a process exceeds the limit of its cgroup, the kernel may
//! kill the process instead of returning an error.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, getrlimit};

/// How much more memory the process can take, and which limit sets this bound.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Headroom {
    /// Bytes that the process can still take.
    pub available_bytes: usize,
    /// The name of the limit that sets this bound, for error messages.
    pub limited_by: String,
}

/// The limits on this process's memory at the time of the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLimits {
    /// The bytes that the process can still take under the tightest limit of the machine and the cgroups.
    pub headroom: Headroom,
    /// The smallest memory limit of all cgroups of this process, and the folder of the cgroup with this limit.
    /// `None` if no cgroup of this process has a memory limit.
    pub cgroup: Option<(usize, PathBuf)>,
    /// The soft and the hard limit of `RLIMIT_MEMLOCK` in bytes. `None` means that there is no limit.
    pub memlock: (Option<usize>, Option<usize>),
}

/// Reads the limits from `/proc`, from files of the cgroups, and with `getrlimit`.
#[must_use]
pub fn memory_limits() -> MemoryLimits {
    let machine = Headroom {
        available_bytes: meminfo("MemAvailable").or_else(free).unwrap_or(usize::MAX),
        limited_by: "free memory of the machine".into(),
    };
    let groups = cgroups();
    let headroom = groups
        .iter()
        .map(|group| Headroom {
            available_bytes: group.limit.saturating_sub(group.held),
            limited_by: format!("memory cgroup {} with a limit of {} bytes", group.folder.display(), group.limit),
        })
        .chain([machine])
        .min_by_key(|headroom| headroom.available_bytes)
        .unwrap_or(Headroom { available_bytes: usize::MAX, limited_by: "nothing".into() });
    let cgroup = groups.into_iter().map(|group| (group.limit, group.folder)).min();
    MemoryLimits { headroom, cgroup, memlock: memlock() }
}

/// A cgroup with a memory limit.
struct Group {
    limit: usize,
    /// The bytes that the cgroup uses, without the page cache of files, which the kernel can reclaim.
    held: usize,
    folder: PathBuf,
}

/// The names that one cgroup version uses: the files of limit and usage, and the counters of page cache in
/// `memory.stat`.
struct Files {
    limit: &'static str,
    usage: &'static str,
    cache: [&'static str; 2],
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: ["total_inactive_file", "total_active_file"],
};
const V2: Files = Files { limit: "memory.max", usage: "memory.current", cache: ["inactive_file", "active_file"] };

/// Returns the cgroups of this process that have a memory limit. In each hierarchy, the cgroup of the process itself
/// comes first, then the ancestors of this cgroup that are visible here.
fn cgroups() -> Vec<Group> {
    let memberships = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut groups = Vec::new();
    for line in memberships.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (kind, files) = if controllers.is_empty() {
            ("cgroup2", &V2)
        } else if controllers.split(',').any(|controller| controller == "memory") {
            ("cgroup", &V1)
        } else {
            continue;
        };
        // Several mounts may show parts of the cgroup tree, including parts of other containers. Choose the mount whose
        // root is the highest ancestor of this process's cgroup. Inside a container, there may be no such mount. Then
        // take the first mount: a container usually has only one, whose root is this process's cgroup.
        let shown: Vec<(PathBuf, PathBuf)> = mounts.lines().filter_map(|line| cgroup_mount(line, kind)).collect();
        let best = shown
            .iter()
            .filter(|(root, _)| Path::new(path).starts_with(root))
            .min_by_key(|(root, _)| root.as_os_str().len());
        let Some((root, mount)) = best.or(shown.first()) else { continue };
        let own = mount.join(Path::new(path).strip_prefix(root).unwrap_or(Path::new("")));
        groups.extend(own.ancestors().take_while(|folder| folder.starts_with(mount)).filter_map(|at| group(at, files)));
    }
    groups
}

/// Returns the root and the mount point from a line of mountinfo. Returns `None` if the line is not a mount of `kind`,
/// or is a mount of cgroup version 1 without the memory controller.
fn cgroup_mount(line: &str, kind: &str) -> Option<(PathBuf, PathBuf)> {
    let (left, right) = line.split_once(" - ")?;
    let mut right = right.split(' ');
    if right.next()? != kind {
        return None;
    }
    let options = right.nth(1)?;
    if kind == "cgroup" && !options.split(',').any(|option| option == "memory") {
        return None;
    }
    let mut left = left.split(' ').skip(3);
    Some((left.next()?.into(), left.next()?.into()))
}

fn group(folder: &Path, files: &Files) -> Option<Group> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<usize>().ok();
    let limit = number(files.limit)?;
    // For "no limit", cgroup version 1 writes the largest multiple of the page size below 2^63.
    if limit >= isize::MAX as usize - (1 << 20) {
        return None;
    }
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache: usize = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| files.cache.contains(name))
        .filter_map(|(_, value)| value.trim().parse::<usize>().ok())
        .sum();
    Some(Group { limit, held: number(files.usage)?.saturating_sub(cache), folder: folder.into() })
}

fn meminfo(name: &str) -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    value.trim().strip_suffix(" kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the free bytes of the machine, for the case that `/proc/meminfo` cannot be read. The number is usually lower
/// than `MemAvailable`, which also counts most of the page cache.
fn free() -> Option<usize> {
    let info = rustix::system::sysinfo();
    let units = usize::try_from(info.freeram.checked_add(info.bufferram)?).ok()?;
    units.checked_mul(usize::try_from(info.mem_unit).ok()?)
}

fn memlock() -> (Option<usize>, Option<usize>) {
    let limit = getrlimit(Resource::Memlock);
    let bytes = |value: Option<u64>| value.and_then(|value| usize::try_from(value).ok());
    (bytes(limit.current), bytes(limit.maximum))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_limits_report_headroom_up_to_mem_total() {
        let limits = memory_limits();
        assert!(limits.headroom.available_bytes > 1 << 20, "{limits:?}");
        assert!(limits.headroom.available_bytes <= meminfo("MemTotal").unwrap_or(usize::MAX));
    }

    #[test]
    fn free_reports_memory_below_mem_total() {
        let (free, total) = (free().unwrap_or(0), meminfo("MemTotal").unwrap_or(0));
        assert!(free > 1 << 20 && free < total, "{free} of {total}");
    }

    #[test]
    fn a_mountinfo_line_gives_root_and_mount_point() {
        let line = "36 25 0:31 /docker/ab /sys/fs/cgroup/memory rw,nosuid shared:11 - cgroup cgroup rw,memory";
        assert_eq!(cgroup_mount(line, "cgroup"), Some(("/docker/ab".into(), "/sys/fs/cgroup/memory".into())));
        assert_eq!(cgroup_mount(line, "cgroup2"), None);
        assert_eq!(cgroup_mount("36 25 0:31 / /cpu rw - cgroup cgroup rw,cpu", "cgroup"), None);
    }

    #[test]
    fn held_memory_of_a_cgroup_excludes_the_file_cache() {
        let folder = std::env::temp_dir().join(format!("memascend-cgroup-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{error}"));
        for (name, text) in [
            ("memory.max", "1000000\n"),
            ("memory.current", "600000\n"),
            ("memory.stat", "anon 400000\ninactive_file 150000\nactive_file 50000\nfile 200000\n"),
        ] {
            fs::write(folder.join(name), text).unwrap_or_else(|error| panic!("{error}"));
        }
        let read = group(&folder, &V2).map(|group| (group.limit, group.held));
        assert_eq!(read, Some((1_000_000, 400_000)));
        fs::write(folder.join("memory.max"), "max\n").unwrap_or_else(|error| panic!("{error}"));
        assert!(group(&folder, &V2).is_none());
        fs::remove_dir_all(&folder).unwrap_or_else(|error| panic!("{error}"));
    }
}
