#pragma once
// The tables of a report.
#include "report/analysis.h"
#include "report/table.h"

namespace assay::report {

// The primary comparison, at the ends of runs.
Table verdict_table(const Setting& setting);       // one row per architecture: the answer
Table domain_table(const Setting& setting);        // Δ_end by domain
Table equal_tokens_table(const Setting& setting);  // E and R by budget
Table early_table(const Setting& setting);         // E and R at the smallest and largest budget
Table wide_table(const Setting& setting);          // E on all unseen domains, further ones included
Table recall_table(const Setting& setting);      // the parts of Δ_end on recall targets and others
Table budget_table(const Setting& setting);      // Δ_end by budget
Table prediction_table(const Setting& setting);  // Δ_end predicted from smaller budgets
Table ladder_table(const Setting& setting);      // the rungs of the reference
Table tuning_table(const Setting& setting);      // every learning rate that was tried
Table check_table(const Setting& setting);       // verdicts at half and twice the learning rate

Table task_table(const Setting& setting);             // tasks × models
Table task_difference_table(const Setting& setting);  // to the reference, paired by item
Table task_agreement_table(const Setting& setting);   // does Δ_end predict the scores?
Table task_run_table(const Setting& setting);         // every task of every run, for the CSV

Table loss_table(const Setting& setting);         // at the end of training, mean and spread
Table degradation_table(const Setting& setting);  // the secondary measure, along training
Table convergence_table(const Setting& setting);
Table slice_table(const Setting& setting);         // losses by kind of target token
Table slice_detail_table(const Setting& setting);  // by run and domain, for the CSV
Table overlap_table(const Setting& setting);       // of test and training text
Table speed_table(const Setting& setting);
Table probe_table(const Setting& setting);       // what the mixers do with earlier positions
Table differing_table(const Setting& setting);   // every hyper-parameter in which models differ
Table common_table(const Setting& setting);      // every other hyper-parameter
Table run_table(const Study& study);             // the provenance of each number
Table kernel_table(const Study& study);          // which kernels the runs used, each once
Table evaluation_table(const Setting& setting);  // every evaluation of every run, for the CSV
Table entropy_table(const Setting& setting);     // of attention, by layer and head, for the CSV

// Medians over the runs of the largest budget, for the table of verdicts.
double tokens_per_second(const Architecture& architecture);
double state_bytes_at_100k(const Architecture& architecture);

std::string table_id(const Setting& setting, const std::string& name);

}  // namespace assay::report
