/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Run a program with the system calls of Linux 3.10.
 *
 *     oldkernel PROGRAM [ARGUMENT ...]
 *
 * A seccomp filter answers each later system call with ENOSYS, as that kernel would. The last system call of 3.10 is
 * finit_module in every table (arch/x86/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
 */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **words)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, SYS_finit_module, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (count < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        perror("oldkernel");
        return 1;
    }
    execv(words[1], words + 1);
    perror(words[1]);
    return 1;
}
