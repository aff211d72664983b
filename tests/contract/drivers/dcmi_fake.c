/* SPDX-License-Identifier: Apache-2.0
 *
 * A libdcmi.so with its machine in text files beside it, which each dcmi_init reads again:
 * `machine` (cards, chips' tables, accidents; written by tests/support/fake_dcmi.py), `vdevs` (live
 * vNPUs) and `shared` (device-share); this library writes the latter two. Structures are those of
 * the vendor's dcmi_interface_api.h, declared again here and not taken from the code under test.
 * Enforces what a chip has: AI cores, AI CPUs, memory, DVPP units and the numbers that its vNPUs may
 * have. A thread delivers lines added to `faults` (CHIP EVENT SERIAL ASSERTION) to the chip's
 * subscribers; earlier lines as well where the first line is `replay`. The error of a real library
 * for a full chip is not published: -8003 here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define OK 0
#define BAD_PARAMETER (-8001)
#define MEMORY (-8003)
#define INNER (-8005)
#define NO_DEVICE (-8008)
#define BUSY (-8020)
#define NOT_SUPPORTED (-8255)
#define AMOUNTS 9
#define MANY 64
#define NONE 0xFFFFFFFFu

enum { AIC, MEM, AICPU, VPC, VENC, VDEC, JPEGD, JPEGE, PNGD };

struct chip_info_v2 { char type[32], name[32], version[32]; unsigned cores; char npu[32]; };
struct pcie_all {
    unsigned maker, subsystem_maker, device, subdevice;
    int domain;
    unsigned bus, dev, function;
    unsigned char reserve[32];
};
struct die_id { unsigned soc_die[5]; };
struct hbm_info {
    unsigned long long memory_size;
    unsigned freq;
    unsigned long long memory_usage;
    int temp;
    unsigned bandwith_util_rate;
};
struct memory_info {
    unsigned long long memory_size, memory_available;
    unsigned freq;
    unsigned long hugepagesize, hugepages_total, hugepages_free;
    unsigned load;
    unsigned char reserve[60];
};
struct proc_mem { int proc_id; unsigned long proc_mem_usage; };
struct spod { unsigned sdid, super_pod_size, super_pod_id, server_index, chassis_id, type, rsv[6]; };
struct base {
    unsigned long long token, token_max, task_timeout;
    unsigned vfg_id;
    unsigned char vip_mode, reserved[31];
};
struct computing {
    float aic, aiv;
    unsigned short dsa, rtsq, acsq, cdqm, c_core, ffts, sdma, pcie_dma;
    unsigned long long memory_size;
    unsigned event_id, notify_id, stream_id, model_id;
    unsigned short topic_schedule_aicpu, host_ctrl_cpu, host_aicpu, device_aicpu, topic_ctrl_cpu;
    unsigned vdev_aicore_utilization;
    unsigned long long vdev_memory_total, vdev_memory_free;
    unsigned char reserved[12];
};
struct media { float jpegd, jpege, vpc, vdec, pngd, venc; unsigned char reserved[32]; };
struct query_info {
    char name[16];
    unsigned status, is_container_used, vfid, vfg_id;
    unsigned long long container_id;
    struct base base;
    struct computing computing;
    struct media media;
};
struct query { unsigned vdev_id; struct query_info info; };
struct soc_free {
    unsigned vfg_num, vfg_bitmap;
    struct base base;
    struct computing computing;
    struct media media;
};
struct soc_total {
    unsigned vdev_num, vdev_id[32], vfg_num, vfg_bitmap;
    struct base base;
    struct computing computing;
    struct media media;
};
struct fault {
    unsigned event_id;
    unsigned short deviceid;
    unsigned char node_type, node_id, sub_node_type, sub_node_id, severity, assertion;
    int event_serial_num, notify_serial_num;
    unsigned long long alarm_raised_time;
    char event_name[256], additional_info[32];
    unsigned char resv[32];
};
struct event { int type; union { struct fault dms_event; } event_t; };
struct filter {
    unsigned long long filter_flag;
    unsigned event_id;
    unsigned char severity, node_type, resv[32];
};
typedef void (*fault_handler)(struct event *event);
struct create_in { unsigned vdev_id, vfg_id; char template_name[32]; unsigned char reserved[64]; };
struct create_out { unsigned vdev_id, pcie[3], vfg_id; unsigned char reserved[32]; };

struct chip { char name[32]; int total[AMOUNTS]; int ids; };
struct template { char chip[32], name[32]; int amount[AMOUNTS]; };
struct card {
    int card, chip, logic, physical;
    char name[32];
    int memory, used, core, temperature, power, is_hbm, share, pod;
    unsigned health, code, domain, bus, dev, function, die[5];
};
struct process { int card, chip, pid; unsigned long bytes; };
struct vdev { int card, chip; unsigned id; char template[32]; int busy; };
struct answer { char call[64]; int code; };

static struct {
    int cards_count, chips_count, templates_count, processes_count, answers_count, vdevs_count;
    struct card cards[MANY];
    struct chip chips[MANY];
    struct template templates[MANY];
    struct process processes[MANY];
    struct answer answers[MANY];
    struct vdev vdevs[MANY * 4];
    char version[64], trip[32], garbled[32];
    unsigned recover;
} m;

static void beside(char *path, size_t size, const char *name)
{
    Dl_info info;
    dladdr((void *)beside, &info);
    snprintf(path, size, "%s", info.dli_fname);
    char *end = strrchr(path, '/');
    snprintf(end ? end + 1 : path, size - (size_t)(end ? end + 1 - path : 0), "%s", name);
}

static int amounts(const char *line, int *into)
{
    int at = 0, n = 0;
    for (int i = 0; i < AMOUNTS; i++, at += n)
        if (sscanf(line + at, " %d%n", &into[i], &n) != 1) return 0;
    return 1;
}

static void read_line(const char *line)
{
    int n = 0;
    struct card *c = &m.cards[m.cards_count];
    struct process *p = &m.processes[m.processes_count];
    if (sscanf(line, "version %63s", m.version) == 1) return;
    if (sscanf(line, "trip %31s", m.trip) == 1) return;
    if (sscanf(line, "garbled %31s", m.garbled) == 1) return;
    if (sscanf(line, "recover %u", &m.recover) == 1) return;
    if (!strncmp(line, "hang", 4)) sleep(600);
    if (!strncmp(line, "crash", 5)) abort();
    if (!strncmp(line, "noise", 5)) {
        printf("[warning] {\"chips\": nonsense\n");
        fflush(stdout);
    }
    struct answer *a = &m.answers[m.answers_count];
    if (sscanf(line, "answer %63s %d", a->call, &a->code) == 2) m.answers_count++;
    struct chip *kind = &m.chips[m.chips_count];
    if (sscanf(line, "chip %31s %d%n", kind->name, &kind->ids, &n) == 2 &&
        amounts(line + n, kind->total))
        m.chips_count++;
    struct template *t = &m.templates[m.templates_count];
    if (sscanf(line, "template %31s %31s%n", t->chip, t->name, &n) == 2 &&
        amounts(line + n, t->amount))
        m.templates_count++;
    if (sscanf(line,
               "card %d %d %d %d %31s %d %d %d %d %d %d %d %d %u %u %x %x %x %x %x %x %x %x %x",
               &c->card, &c->chip, &c->logic, &c->physical, c->name, &c->memory, &c->used, &c->core,
               &c->temperature, &c->power, &c->is_hbm, &c->share, &c->pod, &c->health, &c->code,
               &c->domain, &c->bus, &c->dev, &c->function, &c->die[0], &c->die[1], &c->die[2],
               &c->die[3], &c->die[4]) == 24)
        m.cards_count++;
    if (sscanf(line, "process %d %d %d %lu", &p->card, &p->chip, &p->pid, &p->bytes) == 4)
        m.processes_count++;
}

static void read_vdevs(void)
{
    char path[4096], line[256];
    beside(path, sizeof path, "vdevs");
    FILE *file = fopen(path, "r");
    m.vdevs_count = 0;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        struct vdev *v = &m.vdevs[m.vdevs_count];
        if (sscanf(line, "%d %d %u %31s %d", &v->card, &v->chip, &v->id, v->template, &v->busy) == 5)
            m.vdevs_count++;
    }
    fclose(file);
}

static struct card *find(int card, int chip)
{
    for (int i = 0; i < m.cards_count; i++)
        if (m.cards[i].card == card && m.cards[i].chip == chip) return &m.cards[i];
    return NULL;
}

static void read_shared(void)
{
    char path[4096];
    int card, chip, flag;
    beside(path, sizeof path, "shared");
    FILE *file = fopen(path, "r");
    if (!file) return;
    while (fscanf(file, "%d %d %d", &card, &chip, &flag) == 3)
        if (find(card, chip)) find(card, chip)->share = flag;
    fclose(file);
}

static void write_vdevs(void)
{
    char path[4096], fresh[4096];
    beside(path, sizeof path, "vdevs");
    beside(fresh, sizeof fresh, "vdevs.new");
    FILE *file = fopen(fresh, "w");
    for (int i = 0; i < m.vdevs_count; i++)
        fprintf(file, "%d %d %u %s %d\n", m.vdevs[i].card, m.vdevs[i].chip, m.vdevs[i].id,
                m.vdevs[i].template, m.vdevs[i].busy);
    fclose(file);
    rename(fresh, path);
}

static int told(const char *call)
{
    for (int i = 0; i < m.answers_count; i++)
        if (!strcmp(m.answers[i].call, call)) return m.answers[i].code;
    return OK;
}

#define CHECK_CALL                                 \
    do {                                           \
        int code_ = told(__func__);                \
        if (code_) return code_;                   \
    } while (0)
#define FIND(card, chip)                           \
    CHECK_CALL;                                    \
    struct card *one = find(card, chip);           \
    if (!one) return NO_DEVICE

static const struct chip *kind_of(const struct card *one)
{
    for (int i = 0; i < m.chips_count; i++)
        if (!strcmp(m.chips[i].name, one->name)) return &m.chips[i];
    return NULL;
}

static const struct template *template_of(const struct card *one, const char *name)
{
    for (int i = 0; i < m.templates_count; i++)
        if (!strcmp(m.templates[i].chip, one->name) && !strcmp(m.templates[i].name, name))
            return &m.templates[i];
    return NULL;
}

static int taken(const struct card *one, int what)
{
    int sum = 0;
    for (int i = 0; i < m.vdevs_count; i++)
        if (m.vdevs[i].card == one->card && m.vdevs[i].chip == one->chip)
            sum += template_of(one, m.vdevs[i].template)->amount[what];
    return sum;
}

int dcmi_init(void)
{
    char path[4096], line[512];
    memset(&m, 0, sizeof m);
    m.recover = 1;
    beside(path, sizeof path, "machine");
    FILE *file = fopen(path, "r");
    if (!file) return INNER;
    while (fgets(line, sizeof line, file)) read_line(line);
    fclose(file);
    read_vdevs();
    read_shared();
    return told(__func__);
}

int dcmi_get_driver_version(char *version, unsigned length)
{
    CHECK_CALL;
    snprintf(version, length, "%s", m.version);
    return OK;
}

int dcmi_get_card_list(int *count, int *cards, int length)
{
    CHECK_CALL;
    *count = 0;
    for (int i = 0; i < m.cards_count; i++)
        if (m.cards[i].chip == 0 && *count < length) cards[(*count)++] = m.cards[i].card;
    if (!strcmp(m.garbled, "truncated")) *count = length * 5;
    return OK;
}

int dcmi_get_device_id_in_card(int card, int *most, int *mcu, int *cpu)
{
    CHECK_CALL;
    *most = 0;
    for (int i = 0; i < m.cards_count; i++) *most += m.cards[i].card == card;
    *mcu = *most;
    *cpu = -1;
    if (!strcmp(m.garbled, "garbage")) *most = -7;
    return *most ? OK : NO_DEVICE;
}

int dcmi_get_device_type(int card, int chip, int *type)
{
    FIND(card, chip);
    *type = one->chip != chip;
    return OK;
}

int dcmi_get_device_logic_id(int *logic, int card, int chip)
{
    FIND(card, chip);
    *logic = one->logic;
    return OK;
}

int dcmi_get_device_phyid_from_logicid(unsigned logic, unsigned *physical)
{
    CHECK_CALL;
    for (int i = 0; i < m.cards_count; i++)
        if ((unsigned)m.cards[i].logic == logic) {
            *physical = (unsigned)m.cards[i].physical;
            return OK;
        }
    return NO_DEVICE;
}

int dcmi_get_device_chip_info_v2(int card, int chip, struct chip_info_v2 *info)
{
    FIND(card, chip);
    snprintf(info->type, 32, "Ascend");
    snprintf(info->name, 32, "%s", one->name);
    info->cores = (unsigned)kind_of(one)->total[AIC];
    return OK;
}

int dcmi_get_device_pcie_info_v2(int card, int chip, struct pcie_all *info)
{
    FIND(card, chip);
    memset(info, 0, sizeof *info);
    info->maker = 0x19e5;
    info->domain = (int)one->domain;
    info->bus = one->bus;
    info->dev = one->dev;
    info->function = one->function;
    return OK;
}

int dcmi_get_device_die_v2(int card, int chip, int kind, struct die_id *die)
{
    FIND(card, chip);
    if (kind != 1) return BAD_PARAMETER;
    memcpy(die->soc_die, one->die, sizeof one->die);
    return OK;
}

int dcmi_get_device_hbm_info(int card, int chip, struct hbm_info *info)
{
    FIND(card, chip);
    if (!one->is_hbm) return NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->memory_size = (unsigned long long)one->memory;
    info->memory_usage = (unsigned long long)one->used;
    info->temp = one->temperature;
    info->bandwith_util_rate = 7;
    return OK;
}

int dcmi_get_device_memory_info_v3(int card, int chip, struct memory_info *info)
{
    FIND(card, chip);
    memset(info, 0, sizeof *info);
    info->memory_size = (unsigned long long)one->memory;
    info->memory_available = (unsigned long long)(one->memory - one->used);
    return OK;
}

int dcmi_get_device_utilization_rate(int card, int chip, int kind, unsigned *rate)
{
    FIND(card, chip);
    if (kind != 2) return BAD_PARAMETER;
    *rate = (unsigned)one->core;
    return OK;
}

int dcmi_get_device_temperature(int card, int chip, int *temperature)
{
    FIND(card, chip);
    *temperature = one->temperature;
    return OK;
}

int dcmi_get_device_power_info(int card, int chip, int *power)
{
    FIND(card, chip);
    *power = one->power;
    return one->chip ? NOT_SUPPORTED : OK; /* the first of two dies reports the board's power */
}

int dcmi_get_device_health(int card, int chip, unsigned *health)
{
    FIND(card, chip);
    *health = one->health;
    return OK;
}

int dcmi_get_device_errorcode_v2(int card, int chip, int *count, unsigned *codes, unsigned length)
{
    FIND(card, chip);
    *count = one->code && length ? 1 : 0;
    if (*count) codes[0] = one->code;
    return OK;
}

int dcmi_get_device_resource_info(int card, int chip, struct proc_mem *found, int *count)
{
    FIND(card, chip);
    *count = 0;
    for (int i = 0; i < m.processes_count; i++)
        if (m.processes[i].card == card && m.processes[i].chip == chip) {
            found[*count].proc_id = m.processes[i].pid;
            found[(*count)++].proc_mem_usage = m.processes[i].bytes;
        }
    return OK;
}

int dcmi_get_device_compatibility(int card, int chip, int *word)
{
    FIND(card, chip);
    *word = strcmp(m.garbled, "mismatch") ? 1 : 2;
    return OK;
}

int dcmi_get_device_share_enable(int card, int chip, int *flag)
{
    FIND(card, chip);
    *flag = one->share;
    return OK;
}

int dcmi_set_device_share_enable(int card, int chip, int flag)
{
    FIND(card, chip);
    one->share = flag;
    char path[4096];
    beside(path, sizeof path, "shared");
    FILE *file = fopen(path, "a");
    fprintf(file, "%d %d %d\n", card, chip, flag);
    fclose(file);
    return OK;
}

int dcmi_get_topo_info_by_device_id(int card, int chip, int other_card, int other_chip, int *kind)
{
    FIND(card, chip);
    if (!find(other_card, other_chip)) return NO_DEVICE;
    *kind = one->card == other_card ? 6 : one->pod ? 7 : 3;
    return OK;
}

static void tell(const struct card *one, int is_free, struct computing *c, struct media *d)
{
    const struct chip *kind = kind_of(one);
    float left[AMOUNTS];
    for (int i = 0; i < AMOUNTS; i++)
        left[i] = kind->total[i] < 0 ? -1 : (float)(kind->total[i] - (is_free ? taken(one, i) : 0));
    c->aic = left[AIC];
    c->memory_size = (unsigned long long)left[MEM] * 1024;
    if (one->is_hbm && c->memory_size > 1536) c->memory_size -= 1536; /* what the driver keeps */
    c->device_aicpu = left[AICPU] < 0 ? 0xFFFF : (unsigned short)left[AICPU];
    d->vpc = left[VPC];
    d->venc = left[VENC];
    d->vdec = left[VDEC];
    d->jpegd = left[JPEGD];
    d->jpege = left[JPEGE];
    d->pngd = left[PNGD];
}

static int tell_vdevices(const struct card *one, unsigned sub, void *buffer, unsigned *size)
{
    struct soc_total *total = buffer;
    struct soc_free *rest = buffer;
    struct query *query = buffer;
    if (!kind_of(one)->ids) return NOT_SUPPORTED;
    if (sub == 1) {
        if (*size != sizeof *total) return BAD_PARAMETER;
        memset(total, 0, sizeof *total);
        tell(one, 0, &total->computing, &total->media);
        for (int i = 0; i < m.vdevs_count; i++)
            if (m.vdevs[i].card == one->card && m.vdevs[i].chip == one->chip)
                total->vdev_id[total->vdev_num++] = m.vdevs[i].id;
        return OK;
    }
    if (sub == 2) {
        if (*size != sizeof *rest) return BAD_PARAMETER;
        memset(rest, 0, sizeof *rest);
        tell(one, 1, &rest->computing, &rest->media);
        return OK;
    }
    if (sub != 0 || *size != sizeof *query) return BAD_PARAMETER;
    for (int i = 0; i < m.vdevs_count; i++)
        if (m.vdevs[i].card == one->card && m.vdevs[i].chip == one->chip &&
            m.vdevs[i].id == query->vdev_id) {
            memset(&query->info, 0, sizeof query->info);
            memcpy(query->info.name, m.vdevs[i].template, 16);
            query->info.is_container_used = (unsigned)m.vdevs[i].busy;
            query->info.container_id = m.vdevs[i].busy ? UINT64_C(0xffffffffffff) : 0;
            return OK;
        }
    return NO_DEVICE;
}

int dcmi_get_device_info(int card, int chip, int main_cmd, unsigned sub, void *buffer,
                         unsigned *size)
{
    FIND(card, chip);
    if (main_cmd == 52) return tell_vdevices(one, sub, buffer, size);
    if (main_cmd != 12 || sub != 1 || !one->pod) return NOT_SUPPORTED;
    struct spod *pod = buffer;
    if (*size != sizeof *pod) return BAD_PARAMETER;
    memset(pod, 0, sizeof *pod);
    pod->sdid = 0x1000u + (unsigned)one->logic;
    pod->super_pod_id = (unsigned)one->pod;
    pod->server_index = 3;
    return OK;
}

int dcmi_get_vnpu_config_recover_mode(unsigned *mode)
{
    CHECK_CALL;
    *mode = m.recover;
    return OK;
}

int dcmi_set_vnpu_config_recover_mode(unsigned mode)
{
    CHECK_CALL;
    m.recover = mode;
    return OK;
}

int dcmi_create_vdevice(int card, int chip, struct create_in *in, struct create_out *out)
{
    FIND(card, chip);
    if (!strcmp(m.trip, "fail")) return INNER;
    const struct chip *kind = kind_of(one);
    const struct template *wanted = template_of(one, in->template_name);
    unsigned first = (unsigned)one->physical * 16 + 100;
    if (!wanted || in->vdev_id < first || in->vdev_id >= first + (unsigned)kind->ids)
        return BAD_PARAMETER;
    for (int i = 0; i < m.vdevs_count; i++)
        if (m.vdevs[i].id == in->vdev_id) return BAD_PARAMETER;
    for (int i = 0; i < AMOUNTS; i++)
        if (kind->total[i] >= 0 && taken(one, i) + wanted->amount[i] > kind->total[i]) return MEMORY;
    if (m.vdevs_count == MANY * 4) return MEMORY;
    struct vdev *made = &m.vdevs[m.vdevs_count++];
    made->card = card;
    made->chip = chip;
    made->id = in->vdev_id;
    made->busy = 0;
    snprintf(made->template, sizeof made->template, "%s", wanted->name);
    write_vdevs();
    memset(out, strcmp(m.trip, "garbage") ? 0 : 0xAA, sizeof *out);
    out->vdev_id = made->id;
    return strcmp(m.trip, "late") ? OK : INNER;
}

int dcmi_set_destroy_vdevice(int card, int chip, unsigned id)
{
    FIND(card, chip);
    if (!strcmp(m.trip, "fail")) return INNER;
    for (int i = 0; i < m.vdevs_count; i++) {
        if (m.vdevs[i].card != one->card || m.vdevs[i].chip != one->chip || m.vdevs[i].id != id)
            continue;
        if (m.vdevs[i].busy) return BUSY;
        m.vdevs[i] = m.vdevs[--m.vdevs_count];
        write_vdevs();
        return strcmp(m.trip, "late") ? OK : INNER;
    }
    return NO_DEVICE;
}

/* Faults: one thread for all subscriptions of the process. */

static fault_handler handler_of[MANY];
static int is_telling, lines_before;

static int next_fault(FILE *file, struct fault *into)
{
    unsigned chip, event, assertion;
    int serial;
    memset(into, 0, sizeof *into);
    if (fscanf(file, "%u %x %d %u", &chip, &event, &serial, &assertion) != 4) return 0;
    into->deviceid = (unsigned short)chip;
    into->event_id = event;
    into->event_serial_num = serial;
    into->assertion = (unsigned char)assertion;
    into->severity = 3;
    snprintf(into->event_name, sizeof into->event_name, "fault %x", event);
    return 1;
}

/* Deliver all lines after the first `skip`; returns how many there are. */
static int tell_faults(int skip, int is_silent)
{
    char path[4096];
    int count = 0;
    struct event event = {0};
    beside(path, sizeof path, "faults");
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    if (fscanf(file, "replay%n", &count) == 0) count = 0;
    for (; next_fault(file, &event.event_t.dms_event); count++)
        if (count >= skip && !is_silent && event.event_t.dms_event.deviceid < MANY &&
            handler_of[event.event_t.dms_event.deviceid])
            handler_of[event.event_t.dms_event.deviceid](&event);
    fclose(file);
    return count;
}

static int replays(void)
{
    char path[4096], word[16] = "";
    beside(path, sizeof path, "faults");
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int is_so = fscanf(file, "%15s", word) == 1 && !strcmp(word, "replay");
    fclose(file);
    return is_so;
}

static void *telling(void *nothing)
{
    for (int told_lines = lines_before;; usleep(5000)) told_lines = tell_faults(told_lines, 0);
    return nothing;
}

int dcmi_subscribe_fault_event(int card, int chip, struct filter filter, fault_handler handler)
{
    FIND(card, chip);
    pthread_t thread;
    if (filter.filter_flag || filter.event_id || !handler || one->logic >= MANY)
        return BAD_PARAMETER;
    handler_of[one->logic] = handler;
    if (is_telling) return OK;
    is_telling = 1;
    lines_before = replays() ? 0 : tell_faults(0, 1);
    return pthread_create(&thread, NULL, telling, NULL) ? INNER : OK;
}
